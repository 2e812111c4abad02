"""Settings of a training run, and the presets of Ouro: `ouro_tiny` with its variants, and `smoke` for tests.

| variant | what it is | 3.3 minutes on one H200 gave |
| --- | --- | --- |
| wide | 2 layers of width 384, the shipped model | all promises kept; 3 and 4 links by loop 3, 6 and 8 only by loop 4 |
| deep | 4 layers of width 256 | retrieval, but no link followed: that run was before links were guided; none since |
| chains | deep, mainly chains, `--start-from` its weights | all promises kept; 6 and 8 links by loop 3 |

The default is "wide": later loops are worth most in it. The notes of its card have the numbers. Before links were
guided (`Mixture.guided`, a target at every link) "wide" followed none either.
"""

import dataclasses
from typing import Any

from models.deepseek_config import DeepseekConfig
from models.ouro import OuroConfig
from models.tasks import EVALUATION_TASKS, Mixture
from models.training.latent_objective import LatentObjective
from models.training.objective import Objective


@dataclasses.dataclass(frozen=True)
class Phase:
    """A stretch of the curriculum: it ends at the share `until` of the run."""

    until: float
    lengths: tuple[tuple[int, float], ...]  # (sequence length, share of the steps)
    mixture: Mixture
    stage: str = "dense"  # of `models.training.latent_attends`
    tokens: int | None = None  # in a step, where it is not `tokens_per_step`


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All that decides a run. It lasts `steps`, or `minutes` from the first step to the last.

    Rate and curriculum follow the share of the run that is over, of steps or of time. Only runs counted
    in steps are repeatable bit by bit.
    """

    model: OuroConfig | DeepseekConfig
    phases: tuple[Phase, ...]
    objective: Objective | LatentObjective = dataclasses.field(default_factory=Objective)
    steps: int | None = None
    minutes: float | None = None
    tokens_per_step: int = 32_768
    rate: float = 3e-3
    warmup: int = 100
    decay_from: float = 0.6
    last_rate: float = 0.03  # share of `rate`
    momentum: float = 0.95
    weight_decay: float = 0.3
    clip: float = 1.0
    dtype: str = "bfloat16"
    seed: int = 0
    workers: int = 10
    checkpoint_every: int = 2_000
    quick_evaluations: int = 10
    evaluation_tasks: tuple[str, ...] = EVALUATION_TASKS
    evaluation_lengths: tuple[int, ...] = (512, 1024, 2048, 4096)
    evaluation_count: int = 128
    evaluation_tokens: int = 32_768  # in a batch
    start_from: str | None = None  # folder or name of a model whose weights to begin with
    name: str = "ouro-tiny"  # preset, and the variant behind a colon

    def __post_init__(self):
        if (self.steps is None) == (self.minutes is None):
            raise ValueError(f"give either steps or minutes, got steps={self.steps} and minutes={self.minutes}")
        for name in ("steps", "minutes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        if not self.phases or self.phases[-1].until < 1:
            raise ValueError(f"the last phase must last until 1, got {[phase.until for phase in self.phases]}")
        if len({shape[:2] for shape in self.shapes}) < len(self.shapes):
            raise ValueError(f"phases of one stage need steps of the same size, got {self.shapes}")
        if isinstance(self.model, DeepseekConfig) != isinstance(self.objective, LatentObjective):
            raise ValueError(f"{type(self.objective).__name__} is no objective of a {type(self.model).__name__}")
        if longest := [length for length in self.lengths if length > self.model.max_positions]:
            raise ValueError(f"sequences of {longest} do not fit the model's {self.model.max_positions} positions")

    @property
    def lengths(self) -> tuple[int, ...]:
        """All sequence lengths that training sees, rising."""
        return tuple(sorted({length for phase in self.phases for length, _ in phase.lengths}))

    @property
    def shapes(self) -> tuple[tuple[int, str, int], ...]:
        """The steps that training takes: (length, stage, rows)."""
        found = {(length, p.stage, self.rows(length, p)) for p in self.phases for length, _ in p.lengths}
        return tuple(sorted(found))

    def rows(self, length: int, phase: Phase) -> int:
        """Sequences in a step of this length."""
        return max(1, (phase.tokens or self.tokens_per_step) // length)

    def phase(self, fraction: float) -> Phase:
        """The phase at this share of the run."""
        return next((phase for phase in self.phases if fraction < phase.until), self.phases[-1])

    def command(self) -> str:
        """The command line that starts a run like this one, as far as presets go."""
        preset, _, variant = self.name.partition(":")
        length = f"--steps {self.steps}" if self.minutes is None else f"--minutes {self.minutes}"
        start = f" --start-from {self.start_from}" if self.start_from else ""
        named = f" --variant {variant}" if variant else ""
        return f"python -m models.train --preset {preset}{named} {length} --seed {self.seed}{start} --out DIR"

    def fingerprint(self) -> dict[str, Any]:
        """What a checkpoint must agree with to be continued, as plain JSON values."""
        fields = dataclasses.asdict(self)
        for name in ("workers", "checkpoint_every", "quick_evaluations"):
            fields.pop(name)
        plain = Phase(1.0, (), Mixture())
        for phase in fields["phases"]:  # what is as usual is not told
            for name in ("stage", "tokens"):
                if phase[name] == getattr(plain, name):
                    phase.pop(name)
        return fields


def curriculum(*, first: float = 0.65) -> tuple[Phase, ...]:
    """Dense short sequences first, then every length up to 4,096; short ones stay in: chains are densest there.

    `first` is the share of chains at the beginning. Links are guided until chains are learnt, then partly, so that a
    plain statement stays a likely text.
    """
    begin = Mixture(text=0.6 * (1 - first), chains=first, dense=1.0, guided=1.0, max_hops=2, max_keys=4)
    more = Mixture(text=0.25, chains=0.50, dense=0.8, guided=1.0)
    long = Mixture(text=0.30, chains=0.40, guided=0.75)
    late = Mixture(text=0.35, chains=0.35)
    return (
        Phase(0.12, ((256, 1.0),), begin),
        Phase(0.36, ((256, 0.6), (512, 0.3), (2048, 0.1)), more),
        Phase(0.78, ((512, 0.3), (2048, 0.55), (4096, 0.15)), long),
        Phase(1.0, ((512, 0.2), (2048, 0.35), (4096, 0.45)), late),
    )


CHAINS_AFTERWARDS = (
    Phase(0.2, ((256, 0.7), (512, 0.2), (2048, 0.1)), Mixture(0.15, 0.65, dense=1.0, guided=1.0, max_hops=3)),
    Phase(0.5, ((256, 0.4), (512, 0.4), (2048, 0.2)), Mixture(0.20, 0.60, dense=0.8, guided=1.0)),
    Phase(0.8, ((512, 0.4), (2048, 0.4), (4096, 0.2)), Mixture(0.30, 0.40, guided=0.75)),
    Phase(1.0, ((512, 0.2), (2048, 0.4), (4096, 0.4)), Mixture(0.35, 0.30)),
)
"""For a model that knows text and retrieval: both are rehearsed."""


DEEP = OuroConfig.tiny(hidden_size=256, intermediate_size=704, num_layers=4)

VARIANTS: dict[str, dict[str, Any]] = {
    "wide": {},
    "deep": {"model": DEEP, "phases": curriculum(first=0.55)},
    "chains": {
        "model": DEEP,
        "phases": CHAINS_AFTERWARDS,
        "objective": Objective(dropout=0.15),
        "rate": 2e-3,
        "decay_from": 0.5,
    },
}


def ouro_tiny(variant: str = "wide", **changes) -> TrainConfig:
    """The run that makes ouro-tiny on one H200. Raises ValueError for an unknown variant."""
    if variant not in VARIANTS:
        raise ValueError(f"no variant {variant!r}; known: {', '.join(VARIANTS)}")
    settings: dict[str, Any] = {"model": OuroConfig.tiny(), "phases": curriculum(), "name": f"ouro-tiny:{variant}"}
    settings |= VARIANTS[variant] | changes
    if settings.get("steps") is None:
        settings.setdefault("minutes", 3.3)
    return TrainConfig(**settings)


def smoke(**changes) -> TrainConfig:
    """Twenty steps of a very small model on short sequences, for a CPU."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1}
    mixture = Mixture(max_hops=2, max_keys=2)
    settings: dict[str, Any] = {
        "model": OuroConfig.tiny(**sizes, head_dim=32, max_positions=256),
        "phases": (Phase(0.5, ((128, 1.0),), mixture), Phase(1.0, ((128, 0.5), (256, 0.5)), mixture)),
        "tokens_per_step": 512,
        "warmup": 5,
        "dtype": "float32",
        "workers": 0,
        "quick_evaluations": 0,
        "evaluation_tasks": ("passkey", "keys4", "chain2"),
        "evaluation_lengths": (256,),
        "evaluation_count": 4,
        "evaluation_tokens": 1024,
        "name": "smoke",
    } | changes
    if settings.get("minutes") is None:
        settings.setdefault("steps", 20)
    return TrainConfig(**settings)
