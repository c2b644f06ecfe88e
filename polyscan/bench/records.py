"""What was measured, as data: records, the JSON file, and two of them compared."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from .precision import PrecisionName
from .presets import PassName, VariantName
from .timing import MethodName

# Of the JSON file; a change of a field's meaning is a new number.
SCHEMA = 1

# wrong: its result is beyond the limit, so it has no number. skipped: it cannot do this.
StatusName = Literal["timed", "wrong", "failed", "skipped"]
STATUSES: tuple[StatusName, ...] = get_args(StatusName)


class Group(NamedTuple):
    """What is compared with each other."""

    preset: str
    variant: VariantName
    precision: PrecisionName
    what: PassName

    def __str__(self) -> str:
        return ", ".join(self)


@dataclass(frozen=True)
class Record:
    """One implementation in one group.

    ``reason`` tells why there is no number, ``note`` what to know about one.

    ``error`` and ``limit``, relative to the norm of what is right, are those of ``worst``, an
    output or gradient.

    ``time_ms`` is the median of ``samples_ms``, taken by ``method`` (see
    :mod:`polyscan.bench.timing`), beside their 20th and 80th percentile. ``host_us`` is what a call
    takes from Python, ``add_us`` what an addition in place takes.

    The rates count the :mod:`floor <polyscan.bench.counts>`, not what the implementation really
    does; the fractions are of the rates of a copy and a matrix product in the same run.

    ``extra_mib`` is the memory that a call takes at its peak, results included; ``kernels`` how
    many it launches.
    """

    preset: str
    variant: VariantName
    precision: PrecisionName
    what: PassName
    implementation: str
    status: StatusName
    reason: str | None = None
    note: str | None = None
    chunk_size: int | None = None
    error: float | None = None
    limit: float | None = None
    worst: str | None = None
    time_ms: float | None = None
    time_ms_p20: float | None = None
    time_ms_p80: float | None = None
    samples_ms: tuple[float, ...] | None = None
    method: MethodName | None = None
    host_us: float | None = None
    add_us: float | None = None
    gb_per_s: float | None = None
    tflop_per_s: float | None = None
    bandwidth_fraction: float | None = None
    matrix_fraction: float | None = None
    extra_mib: float | None = None
    kernels: int | None = None

    @property
    def group(self) -> Group:
        return Group(self.preset, self.variant, self.precision, self.what)

    @property
    def key(self) -> tuple[str, ...]:
        return (*self.group, self.implementation)

    def is_better_than(self, other: "Record") -> bool:
        """A right result before a wrong one before none, and then the faster one."""

        def rank(record: Record) -> tuple[int, float]:
            return STATUSES.index(record.status), record.time_ms or math.inf

        return rank(self) < rank(other)

    def as_json(self) -> dict[str, Any]:
        """Without what is not known; infinity, which JSON has not, is not known either."""
        return {
            name: value
            for name, value in asdict(self).items()
            if value is not None and not (isinstance(value, float) and not math.isfinite(value))
        }


class Run(NamedTuple):
    """A run's records, in the order in which they were made, and what it ran on."""

    machine: dict[str, Any]
    records: list[Record]

    def save(self, path: Path) -> None:
        content = {
            "schema": SCHEMA,
            "machine": self.machine,
            "records": [record.as_json() for record in self.records],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Run":
        """
        Raises:
            OSError: the file cannot be read.
            ValueError: it is not one of these files.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["schema"] != SCHEMA:
                raise ValueError(f"{path} has schema {content['schema']}, not {SCHEMA}")
            known = {field.name for field in fields(Record)}
            for record in content["records"]:
                if not record.keys() <= known:
                    raise ValueError(f"{path}: unknown fields {sorted(record.keys() - known)}")
            return cls(content["machine"], [_record(record) for record in content["records"]])
        except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is no file of polyscan's benchmarks: {error!r}") from error


def _record(content: dict[str, Any]) -> Record:
    samples = content.get("samples_ms")
    return Record(**{**content, "samples_ms": None if samples is None else tuple(samples)})


def grouped(records: Sequence[Record]) -> dict[Group, list[Record]]:
    groups: dict[Group, list[Record]] = {}
    for record in records:
        groups.setdefault(record.group, []).append(record)
    return groups


class Change(NamedTuple):
    """Of what two runs both hold. ``ratio``, how many times as fast; None without two times."""

    before: Record
    after: Record

    @property
    def ratio(self) -> float | None:
        if self.before.time_ms is None or self.after.time_ms is None:
            return None
        return self.before.time_ms / self.after.time_ms


def compare(before: Run, after: Run) -> list[Change]:
    by_key = {record.key: record for record in before.records}
    return [Change(by_key[r.key], r) for r in after.records if r.key in by_key]
