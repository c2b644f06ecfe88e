"""What several backends use: host-side mathematics and bookkeeping. Imports no GPU library."""
