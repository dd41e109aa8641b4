"""Generation: sampling, the workflow and the generator service."""

from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from schemas.config.agents import AgentsConfig
from schemas.config.base import Seconds, Section, UserPath, matching
from schemas.urls import hide_password

REFUSED_SAMPLING = (
    "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words",
    "allowed_token_ids", "min_tokens", "logits_processors",
)  # fmt: skip
"""Sampling settings of other libraries that make log-probabilities differ from the policy's."""

LIVE = "live"
"""The workflow whose conversations users hold."""
ENDPOINT_WORKFLOWS = ("agent", LIVE)
"""Built-in workflows whose model calls come to the generator's endpoint."""
EPISODE_WORKFLOWS = ("agent", "environment", LIVE, "tools")
"""Built-in workflows whose samples are conversations of several model calls."""
EXACT_ENGINES = ("transformers", "vllm")
"""Built-in engines with an exact mode."""
REWARDING_WORKFLOWS = ("agent", "environment", "fragments", LIVE)
"""Workflows that reward their own samples, so that no reward term is required."""

PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
"""Arguments of vLLM whose product is the number of an engine's GPUs."""


class SamplingConfig(Section):
    """Sampling of completions."""

    n: int = Field(8, ge=1, le=1024)
    """Samples per prompt: the group size."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature; log-probabilities include it."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; below 1, log-probabilities are those of the truncated distribution."""
    top_k: int = Field(-1, ge=-1)
    """Keep the k likeliest tokens; -1 keeps all."""
    max_tokens: int = Field(256, ge=1)
    """Most generated tokens of a completion."""
    stop: list[str] = []
    """Strings that end a completion."""

    @model_validator(mode="before")
    @classmethod
    def _unbent(cls, data: Any) -> Any:
        for name in REFUSED_SAMPLING if isinstance(data, dict) else ():
            if name in data:
                raise ValueError(
                    f"sampling.{name} is not supported: it changes the sampled distribution, so that"
                    " log-probabilities are not the policy's and training on them is biased"
                )
        return data


class WorkflowConfig(Section):
    """The workflow, which makes trajectories from a prompt."""

    name: str = "single_turn"
    """single_turn, tools, environment, agent, live, fragments, or your own as module:name or file.py:name."""
    args: dict[str, Any] = {}
    """Arguments of the workflow."""


class HttpEngineConfig(Section):
    """The inference server of the engine http: launched by the generator, or already running."""

    dialect: Literal["sglang", "vllm", "openai"]
    """API of the server: sglang, vllm or openai. `tidemill eval` can evaluate one with openai; it cannot be trained
    with."""
    url: str | None = None
    """Address of a running server, such as http://10.0.0.7:30000, which serves only this generator. By default the
    generator launches a server that only its user reaches and that ends with the generator."""
    command: list[str] | None = Field(None, min_length=1)
    """Program that launches the server, with its first arguments; Tidemill appends options. By default the Python that
    runs Tidemill, with the module of the dialect. For a server in its own environment: [/opt/sglang/bin/python, -m,
    sglang.launch_server]."""
    start_s: Seconds = 600.0
    """How long the server may take until its health check succeeds."""
    update_s: Seconds = 600.0
    """How long the server may take to load new weights. After that the generator ends."""
    api_key_env: str | None = None
    """Environment variable with the server's API key, sent as a bearer token."""

    @model_validator(mode="after")
    def _launched_or_there(self) -> Self:
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"generator.http.url {hide_password(self.url)!r} must begin with http:// or https://")
        if self.dialect == "openai" and self.url is None:
            raise ValueError("generator.http.dialect openai requires a running server: set generator.http.url")
        if self.url is not None and self.command is not None:
            raise ValueError(
                "generator.http.command launches a server, and generator.http.url names a running one:"
                " set only one of them"
            )
        return self


class GeneratorConfig(Section):
    """The generator service."""

    engine: str = "auto"
    """auto, vllm, transformers, http, scripted, mlp, or your own as module:name."""
    args: dict[str, Any] = {}
    """Arguments of the engine. vllm: AsyncEngineArgs. http: options of the server that is launched."""
    http: HttpEngineConfig | None = None
    """The server of the engine http."""
    replicas: int = Field(1, ge=0)
    """Generator services that `tidemill up` starts."""
    max_samples: int = Field(64, ge=1)
    """Samples in flight in one replica."""
    lease_s: Seconds = 30.0
    """How long a replica may be silent before another replica claims its work."""
    stall_s: Seconds = 300.0
    """A replica ends, and is restarted, if no running request gains a token for this long."""
    probe_tolerance: float | None = Field(None, gt=0)
    """Largest accepted mean difference of a probe's log-probabilities, nats. By default, one and a half times what
    correct weights were found to differ by; 1e-3 in float32, and 0.1 in 16-bit types at first."""
    update: Literal["keep", "recompute", "drain"] = "keep"
    """What happens to samples in flight when new weights arrive. keep: they continue with their cached keys and values.
    recompute: the new weights compute the cache again. drain: they finish first, and new samples wait, so that every
    sample has one version."""
    flush_every: int | None = Field(None, ge=2)
    """Save unfinished samples each time they gain this many tokens, of which a killed replica then loses no more. By
    default it loses its unfinished samples. Finished model calls of agents are always saved."""
    allow_truncated: bool = False
    """Allow training on samples drawn with top_p, top_k or engine arguments that change the sampled distribution. Their
    log-probabilities are not the policy's."""
    exact: bool = False
    """Compute each token in an order of sums that does not depend on what is in flight with it. With the engine
    transformers the trainer computes in the same order, so that both have the same log-probabilities to the last bit,
    and samples have seeds: `tidemill replay --rollouts` generates them again. With vllm, its batch-invariant mode."""
    workflow: WorkflowConfig = Field(default_factory=WorkflowConfig)
    agents: AgentsConfig = Field(default_factory=AgentsConfig)

    @model_validator(mode="after")
    def _check_exact(self) -> Self:
        if self.exact and self.engine not in EXACT_ENGINES:
            raise ValueError(
                f"generator.exact: generator.engine must be {' or '.join(EXACT_ENGINES)}, is {self.engine!r}"
            )
        if self.exact and self.update == "keep":
            raise ValueError(
                "generator.exact: generator.update keep leaves keys and values of older weights to a sample:"
                " set it to recompute or drain"
            )
        return self

    @model_validator(mode="after")
    def _check_http(self) -> Self:
        if (self.engine == "http") != (self.http is not None):
            raise ValueError(
                "generator.engine http requires generator.http with a dialect: sglang, vllm or openai"
                if self.http is None
                else f"generator.http requires generator.engine http, which is {self.engine!r}"
            )
        if self.http is None or self.http.url is None:
            return self
        if self.args:
            raise ValueError(
                f"generator.args {', '.join(self.args)}: options of a server that Tidemill launches, but the server"
                " at generator.http.url is running already; start it with these options"
            )
        if self.replicas > 1:
            raise ValueError(
                f"generator.replicas {self.replicas}: the server at generator.http.url can serve one generator only,"
                " which pauses it and replaces its weights; give each further generator its own generator.http.url"
            )
        return self


POOL_NAME = "[a-z]([a-z0-9-]{0,30}[a-z0-9])?"
SAME = frozenset({"workflow", "allow_truncated", "lease_s", "exact"})
"""Settings of ``generator`` that all generators of a run must share."""
SAME_ARGS = ("tokenizer", "revision", "hf_", "chat_template", "json_model_override", "generation_config")
"""Beginnings of engine arguments that choose the model or its tokens."""
OF_MACHINE = frozenset({"processes", "python", "env", "memory_mb", "episodes", "address", "public_url"})
"""Settings of ``generator.agents`` that may differ: they say where agents run, not what their samples are."""


VariableName = Annotated[
    str,
    matching(
        "(?!TIDEMILL_)[A-Za-z_][A-Za-z0-9_]*",
        "pools.NAME.env or units",
        "the name of an environment variable that does not begin with TIDEMILL_",
    ),
]
SbatchOption = Annotated[
    str,
    matching(
        "(?!(?:array|job-name)$)[a-z][a-z-]*",
        "pools.NAME.slurm",
        "the name of a long option of sbatch, such as partition, but not array or job-name",
    ),
]
SbatchValue = Annotated[str, matching(r"[^\n]*", "pools.NAME.slurm", "one line")]


class KubernetesPoolConfig(Section):
    """The pods of a pool's generators, where they differ from those of the run's other generators."""

    node_selector: dict[str, str] = {}
    """Labels of the nodes that may run them."""
    tolerations: list[dict[str, Any]] = []
    """Tolerations in addition to those for GPUs and spot nodes."""
    image: str | None = Field(None, min_length=1)
    """Their image, by default that of all generators."""


class PoolConfig(Section):
    """One kind of generators: what differs from ``generator``, and how its processes are started."""

    generator: dict[str, Any] = {}
    """Settings of the section generator that are different in this pool, such as replicas, max_samples or args. If
    engine differs, args and http of the section generator do not apply. workflow, allow_truncated, exact and lease_s
    cannot differ, nor what chooses the model or its tokens."""
    nodes: list[str] = []
    """Machines that have these generators, by the names of their `tidemill node`, in which * stands for any text. By
    default `tidemill up` starts them on its machine."""
    env: dict[VariableName, str] = {}
    """Environment variables of its generators. $NAME in a value is a variable of its machine, or empty there."""
    python: UserPath | None = None
    """Interpreter of its generators, with the same release of Tidemill; by default the one that starts them."""
    units: list[dict[VariableName, str]] = []
    """What each machine of the pool has a few of, such as robots, cameras or licences: of each one, the environment
    variables of the generator that has it. Each generator has one, and no other generator of the machine has the same.
    By default, replicas is their number."""
    slurm: dict[SbatchOption, SbatchValue] = {}
    """Options of its job array for sbatch, such as partition: l40s, instead of those of all jobs."""
    ray: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Resources that Ray must have for one generator, such as l40s: 1."""
    kubernetes: KubernetesPoolConfig = Field(default_factory=KubernetesPoolConfig)

    @property
    def units_problem(self) -> str | None:
        """Return what is wrong with the units; None if nothing is."""
        names = {frozenset(unit) for unit in self.units}
        if len(names) > 1 or frozenset() in names:
            return "must each have the same environment variables, one or more"
        if len({frozenset(unit.items()) for unit in self.units}) < len(self.units):
            return "must differ: two are equal"
        if twice := sorted(name for unit in self.units[:1] for name in unit if name in self.env):
            return f"and env both have {twice[0]}: remove one of them"
        return None

    def is_on(self, node: str) -> bool:
        """Return whether a machine has these generators. node: its name; empty for that of `tidemill up`."""
        return any(node and fnmatchcase(node, pattern) for pattern in self.nodes) if self.nodes else not node

    @property
    def common(self) -> list[str]:
        """Return the settings given here that all generators must share, by their path below the pool."""
        found = [f"generator.{name}" for name in self.generator if name in SAME]
        for section, refused in (
            ("args", lambda name: name.startswith(SAME_ARGS)),
            ("agents", lambda name: name not in OF_MACHINE),
        ):
            given = self.generator.get(section)
            names = given if isinstance(given, dict) else ()
            found += [f"generator.{section}.{name}" for name in names if refused(str(name))]
        return found
