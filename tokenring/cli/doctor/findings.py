"""The findings of an examination, as values; JSON has the same names (docs/doctor.md)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

FORMAT, VERSION = "tokenring-doctor", 1


@dataclass(frozen=True)
class Problem:
    """Something that is wrong or missing: which part it is about, what it is, and what to do.

    hurts: it stops that part from working; else it is a warning.
    """

    about: str
    what: str
    advice: str
    hurts: bool = True


@dataclass(frozen=True)
class Accelerators:
    """Devices of one type (torch's word for it: "cuda", "npu"), by name. memory_bytes: of each."""

    type: str
    names: list[str]
    memory_bytes: list[int | None]


@dataclass(frozen=True)
class OperatorFinding:
    """An operator of torch_npu's, with its arguments in order; None: this torch_npu has no such operator."""

    name: str
    arguments: list[str] | None


@dataclass(frozen=True)
class Option:
    """A transport or a kernel: why it would be used, or why not."""

    name: str
    why: str


@dataclass(frozen=True)
class DefaultChoice:
    """The choice of "auto" for tensors on a device. None: nothing here serves them, `others` says why."""

    device: str
    transport: Option | None
    kernel: Option | None
    others: list[Option] = field(default_factory=list)
    merge: Option | None = None  # what merges partial results; None: it could not be asked
    measured: list[Option] = field(default_factory=list)  # tables of transports: of which ranks, and what they have


@dataclass(frozen=True)
class TorchNpu:
    """torch_npu: its version by its metadata (None: not installed), and whether it can be imported.

    autoload: what `import torch` does with it: "works", "broken", "off" (TORCH_DEVICE_BACKEND_AUTOLOAD=0), or "none"
    where it registers nothing. transfer: its transfer_to_npu is at work, torch.cuda stands for torch.npu.
    """

    installed: str | None = None
    imports: bool | None = None
    autoload: str = "none"
    wants_torch: str | None = None
    transfer: bool = False


@dataclass(frozen=True)
class Cann:
    """CANN according to its files: version (None: they have none) and folder."""

    version: str | None
    folder: str


@dataclass(frozen=True)
class Variable:
    """An environment variable that matters; what is wrong with its value, if anything."""

    name: str
    value: str
    warning: str | None = None


@dataclass
class Findings:
    """The whole examination."""

    tokenring: str
    python: str
    machine: str
    torch: str | None = None
    torch_npu: TorchNpu = field(default_factory=TorchNpu)
    cann: Cann | None = None
    accelerators: list[Accelerators] = field(default_factory=list)
    operators: list[OperatorFinding] = field(default_factory=list)
    choices: list[DefaultChoice] = field(default_factory=list)
    environment: list[Variable] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    plans_folder: str | None = None  # where plans are kept; None: nowhere

    def to_json(self) -> str:
        """Return JSON with "format" and "version" first, indented, ending in a newline."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=2) + "\n"
