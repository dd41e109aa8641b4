"""The checks of a configuration before anything starts, shared by ``tidemill up``, ``slurm`` and ``doctor``.

Cheap checks come first, so that a wrong name is reported at once: names, folders, the address of the control plane,
the model's files. A child process (user_code.py) opens data, runs the user's code and imports PyTorch: this process
stays small, and code that hangs or crashes costs one line. No weights are loaded, no service is started.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from pathlib import Path

from broker.connection.connection import find_url
from broker.weights.peers.certificate import has_tls
from consumers.trainer.records.trackers import check_trackers
from deploy.checks.finding import Finding, one_line, run_check
from deploy.checks.model_files import check_hub_or_folder, check_tokenizer, find_unmade
from deploy.checks.names import check_names
from deploy.control_plane.address import listen, read_token
from producers.conversation.parsing.factory import check_parsers
from producers.engines.factory import engine_name
from producers.engines.sampling import check_sampling
from producers.engines.vllm.arguments import check_machine, check_names_of_arguments
from producers.engines.vllm.before_import import check_batch_invariance, is_cpu_build
from producers.tasks import make_sampling
from schemas.config import HttpEngineConfig, TidemillConfig, by_pool, dump_config
from schemas.errors import ConfigError
from schemas.model_folder import check_quantised, find_tokens
from schemas.policy_shape import PolicyShape

USER_CODE_DEADLINE_S = 600.0
"""A dataset of the Hub may have to be downloaded first."""


def check(config: TidemillConfig, here: bool = True, skip: Collection[str] = (), cards: Iterable[Finding] = ()) -> None:
    """Raise ConfigError, one line, for the first check that fails. Warnings go to stderr.

    here: services run on this machine, with its packages. skip: names of checks to leave out; ``user code`` is all
    that run in the child process, ``GPUs`` what only a machine with the run's GPUs can tell. cards: findings on the
    GPUs' memory, which come last.
    """
    for finding in chain(inspect(config, here=here, skip=skip), cards):
        if finding.level == "fail":
            raise ConfigError(finding.text)
        if finding.level == "warn":
            print(f"tidemill: warning: {finding.text}", file=sys.stderr)


def inspect(
    config: TidemillConfig,
    thorough: bool = False,
    here: bool = True,
    skip: Collection[str] = (),
    step_s: float | None = None,
) -> Iterator[Finding]:
    """Run all checks and yield their findings.

    here, skip: as in ``check``. thorough: also build the model without its weights and score a first example, which
    takes longer. step_s: known seconds of a training step, which are compared with the times of episodes.
    """
    checks: dict[str, Callable[[], Finding | str | None]] = {
        "names": lambda: check_names(config),
        "packages": lambda: check_pools(config, here, "GPUs" not in skip),
        "folders": lambda: check_folders(config),
        "control plane": lambda: check_control(config),
        "model": lambda: check_models(config),
    }
    unusable = False
    for name in (name for name in checks if name not in skip):
        found = run_check(name, checks[name])
        unusable |= name == "model" and found.level == "fail"
        yield found
    if "user code" not in skip:
        # What reads the model would ask the Hub again, with its retries, and fail by the same cause.
        yield from _check_user_code(config, thorough and not unusable, step_s)
    if thorough and unusable:
        yield Finding(
            "prompts, model size", "warn", "not checked: there is no model", "see the line of the model above"
        )


def check_pools(config: TidemillConfig, here: bool = True, gpus: bool = True) -> str:
    """Check the packages of each pool's generators in this interpreter and machine; ConfigError if one is missing.

    gpus: check the machine's GPUs, too.
    """
    found = {}
    for name, one in by_pool(config).items():
        python = config.pools[name].python if name else None
        local = here and (not name or config.pools[name].is_on(""))
        try:
            if local and python is not None and not os.access(python, os.X_OK):
                raise ConfigError(f"python {python} is no program that can be started")
            found[name] = check_packages(one, local and python is None, gpus)
        except ConfigError as error:
            raise ConfigError(f"pools.{name}: {error}" if name else str(error)) from error
    return ", ".join(f"pool {name}: {text}" if name else text for name, text in found.items())


def check_packages(config: TidemillConfig, here: bool = True, gpus: bool = True) -> str:
    """Raise ConfigError for a package that is missing, or that does not accept its settings. Imports no package."""
    check_sampling(make_sampling(config.sampling), config.generator.allow_truncated, config.generator.args)
    check_trackers(config.trainer.trackers)
    engine = engine_name(config.generator.engine)
    if here:
        _need("torch", "the trainer", "train")
        publish = config.trainer.publish
        if publish.from_peers and has_tls(find_url(config.broker.url) or ""):
            _need("cryptography", f"trainer.publish.transport {publish.transport} beside a broker with TLS", "tls")
        if engine in ("vllm", "transformers"):
            _need(engine, f"generator.engine {engine}", "vllm" if engine == "vllm" else "train")
        if config.generator.http is not None:
            _check_server(config.generator.http)
        if config.trainer.lora is not None:
            _need("peft", "trainer.lora", "train")
        for name, section in (("trainer", config.trainer), ("trainer.critic", config.trainer.critic)):
            if section is not None and section.optimizer.name == "adamw_8bit":
                _need("torchao", f"{name}.optimizer.name adamw_8bit")
    if engine == "vllm":
        check_names_of_arguments(config.generator.args)
        if here and is_cpu_build():
            check_machine(config.generator.args, on_cpu=True, devices=1)
    agents = config.generator.agents
    check_parsers(agents.tool_parser, agents.reasoning_parser, engine == "vllm")
    if not config.generator.exact:
        return f"engine {engine}"
    if engine == "vllm" and here and gpus:
        return f"engine {engine}, batch-invariant on compute capability {check_batch_invariance()}"
    return f"engine {engine}, exact"


def _check_server(http: HttpEngineConfig) -> None:
    """Raise ConfigError for a server that cannot be used for training, launched or reached."""
    if http.dialect == "openai":
        raise ConfigError(
            "generator.http.dialect openai cannot be used for training: OpenAI's protocol reports neither sampled"
            " log-probabilities nor weight versions, and loads no weights; use it for tidemill eval and judges"
        )
    _need("httpx", "generator.engine http", "http")
    if http.command is not None and shutil.which(http.command[0]) is None:
        raise ConfigError(f"generator.http.command {http.command[0]}: program not found")
    if http.url is None and http.command is None:
        _need(http.dialect, f"generator.http.dialect {http.dialect} without url or command", http.dialect)


def _need(package: str, what: str, extra: str = "") -> None:
    if importlib.util.find_spec(package) is None:
        command = f"pip install 'tidemill[{extra}]'" if extra else f"pip install {package}"
        raise ConfigError(f"{what} needs the package {package}: {command}")


def check_folders(config: TidemillConfig) -> str:
    """Raise ConfigError for a folder that cannot be created or written."""
    _check_writable("run.folder", config.folder)
    publish = config.trainer.publish
    if publish.transport != "redis" and publish.folder is not None:
        _check_writable("trainer.publish.folder", publish.folder.resolve())
    if config.warm_start is not None:
        _check_writable("model.path", Path(config.model.path).resolve())
    return f"{config.folder} can be written"


def _check_writable(setting: str, folder: Path) -> None:
    existing = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    try:
        # Modes do not tell for root, nor on every file system, so try.
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        reason = "it is a file" if existing.is_file() else str(error.strerror)
        where = "" if existing == folder else f" in {existing}"
        raise ConfigError(f"{setting} {folder} cannot be written{where}: {reason}") from error


def check_control(config: TidemillConfig) -> Finding | str:
    """Raise ConfigError if the control plane cannot listen, or not safely. Warn about a port that is in use."""
    settings = config.control
    if not settings.enabled:
        return "disabled"
    token = read_token(settings.token_file, os.environ)
    with contextlib.closing(listen(settings.host, settings.port, token)) as listener:
        port = listener.getsockname()[1]
    if settings.port not in (0, port):
        text = f"control.port {settings.port} is in use on {settings.host}: the control plane will use a free one"
        return Finding("control plane", "warn", text, "set control.port to a free port, or to 0 for any")
    return f"{settings.host}:{settings.port or 'any port'}"


def check_models(config: TidemillConfig) -> str:
    """Check every named model, by its files or with one request to the Hub. Raises ConfigError."""
    trainer = config.trainer
    if config.model.kind == "mlp":
        shape = PolicyShape.read(config.model.path, sac=trainer.sac is not None)
        return f"{config.model.path}: {shape.observations} observations, {shape.actions} actions"
    found = "created by warm_start" if config.warm_start else _check_policy(config)
    if config.warm_start and not config.warm_start.starts_untrained and find_unmade(config):
        check_hub_or_folder(config.warm_start.model, "warm_start.model")
    if trainer.kl.coef and trainer.kl.model is not None:
        check_hub_or_folder(trainer.kl.model, "trainer.kl.model")
    if trainer.critic is not None and trainer.critic.model is not None:
        check_hub_or_folder(trainer.critic.model, "trainer.critic.model")
    for term in config.reward.terms:
        for name, arg in (("reward_model", "path"), ("teacher", "model")):
            if term.name == name and arg in term.args:
                check_hub_or_folder(str(term.args[arg]), f"{arg} of the reward term {name!r}")
    return f"{config.model.path}: {found}"


def _check_policy(config: TidemillConfig) -> str:
    model = config.model
    folder = check_hub_or_folder(model.path, "model.path")
    if folder is None:
        return "on the Hub"
    if check_quantised(folder, adapted=config.trainer.lora is not None):
        _need("bitsandbytes", f"model.path {folder} in 4 bits")
    check_tokenizer(folder)
    find_tokens(folder, model.output_tokens)
    return f"in {folder}"


def check_model(config: TidemillConfig) -> None:
    """Raise ConfigError if model.path is not a model and no warm_start creates one."""
    if config.model.kind == "mlp":
        PolicyShape.read(config.model.path, sac=config.trainer.sac is not None)
    elif config.warm_start is None:
        _check_policy(config)


def _check_user_code(config: TidemillConfig, thorough: bool, step_s: float | None) -> Iterator[Finding]:
    """Yield the findings of the child process as they come. A crash or a timeout is a finding, too."""
    environment = {**os.environ, "TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as request,
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output,
    ):
        json.dump({"config": dump_config(config), "thorough": thorough, "step_s": step_s}, request)
        request.seek(0)
        command = [sys.executable, "-P", "-m", "deploy.checks.user_code"]
        child = subprocess.Popen(
            command, stdin=request, stdout=subprocess.PIPE, stderr=output, encoding="utf-8", env=environment
        )
        ends = time.monotonic() + USER_CODE_DEADLINE_S
        timer = threading.Timer(USER_CODE_DEADLINE_S, child.kill)
        timer.start()
        running = "user code"
        try:
            for line in child.stdout or ():
                answer = json.loads(line)
                if "begins" in answer:
                    running = answer["begins"]
                else:
                    yield Finding(**answer)
            is_late = time.monotonic() >= ends
        finally:
            timer.cancel()
            child.kill()
            child.communicate()
        if running == "end":
            return
        output.seek(0)
        lines = output.read().strip().splitlines()
        reason = lines[-1] if lines else f"exit code {child.returncode}"
        text = f"no answer within {USER_CODE_DEADLINE_S:.0f} s" if is_late else f"the check ended: {reason}"
        yield Finding(running, "fail", one_line(f"{running}: {text}"))
