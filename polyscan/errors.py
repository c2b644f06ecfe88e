"""The errors of polyscan's own; wrong arguments raise ValueError or TypeError."""

from collections.abc import Mapping


class PolyscanError(Exception):
    """Base of every error below."""


class BackendError(PolyscanError):
    """No backend can do what was asked.

    ``reasons`` maps each backend that was considered to why it was passed over.
    """

    def __init__(self, headline: str, reasons: Mapping[str, str]) -> None:
        self.headline = headline
        self.reasons = dict(reasons)
        lines = [headline, *(f"  {name}: {reason}" for name, reason in self.reasons.items())]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type["BackendError"], tuple[str, dict[str, str]]]:
        """Pickled by its arguments, so that it survives the way out of a worker process."""
        return type(self), (self.headline, self.reasons)


class BackendUnavailable(BackendError, RuntimeError):
    """The backend that was named cannot run on this machine at all."""


class UnsupportedProblem(BackendError, ValueError):
    """The backend that was named, or every backend, cannot do this problem."""


class SecondDerivativeError(PolyscanError, RuntimeError):
    """A gradient of polyscan was differentiated again."""


class TransformError(PolyscanError, RuntimeError):
    """A function of polyscan was called under vmap, a torch.func transform or forward-mode AD."""
