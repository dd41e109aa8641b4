"""The check of a configuration before anything starts, the same for ``tidemill up``, ``slurm`` and ``doctor``.

Cheap things come first, so that a wrong name is told at once: names, folders, the address of the control plane, the
model's files. What opens data, runs the user's code or needs PyTorch is looked at in a child process (trial.py): this
one stays small, and code that hangs or crashes costs one line. No weights are loaded, no service is started.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from broker.connection.connection import find_url
from broker.weights.peers.certificate import has_tls
from consumers.trainer.records.trackers import check_trackers
from deploy.checks.finding import Finding, examine, one_line
from deploy.checks.model_files import check_hub_or_folder, check_tokenizer
from deploy.checks.names import check_names
from deploy.control_plane.address import listen, read_token
from producers.conversation.parsing.factory import check_parsers
from producers.engines.factory import engine_name
from producers.engines.sampling import check_sampling
from producers.engines.vllm.arguments import check_names_of_arguments
from producers.tasks import make_sampling
from schemas.config import HttpEngineConfig, TidemillConfig, dump_config
from schemas.errors import ConfigError

TRIAL_DEADLINE_S = 600.0
"""A dataset of the hub may have to be downloaded first."""


def check(config: TidemillConfig, here: bool = True, skip: Collection[str] = ()) -> None:
    """ConfigError, one line, for the first thing that cannot work; what is only strange is told on stderr.

    here: services run on this machine, with the packages that are installed on it. skip: names of checks that can tell
    nothing here, ``trial`` for all that are made in the child process.
    """
    for finding in inspect(config, here=here, skip=skip):
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
    """Everything that can be told before the run, one by one.

    here, skip: as in ``check``. thorough: also build the model without its weights, and score a first example, which
    takes longer. step_s: what somebody knows a training step to take, to compare with the times of episodes.
    """
    looks: dict[str, Callable[[], Finding | str | None]] = {
        "names": lambda: check_names(config),
        "packages": lambda: check_packages(config, here),
        "folders": lambda: check_folders(config),
        "control plane": lambda: check_control(config),
        "model": lambda: check_models(config),
    }
    for name, look in looks.items():
        if name not in skip:
            yield examine(name, look)
    if "trial" not in skip:
        yield from _trial(config, thorough, step_s)


def check_packages(config: TidemillConfig, here: bool = True) -> str:
    """ConfigError for what needs a package that is not there, or does not take what it is given. Imports none."""
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
    if engine == "vllm":
        check_names_of_arguments(config.generator.args)
    agents = config.generator.agents
    check_parsers(agents.tool_parser, agents.reasoning_parser, engine == "vllm")
    return f"engine {engine}"


def _check_server(http: HttpEngineConfig) -> None:
    """ConfigError for a server that can't be trained with, launched, or asked."""
    if http.dialect == "openai":
        raise ConfigError(
            "generator.http.dialect openai can't be trained with: OpenAI's protocol tells neither log-probabilities of"
            " what was sampled nor versions, and takes no weights; such a server serves tidemill eval and judges"
        )
    _need("httpx", "generator.engine http", "http")
    if http.command is not None and shutil.which(http.command[0]) is None:
        raise ConfigError(f"generator.http.command {http.command[0]}: there is no such program")
    if http.url is None and http.command is None:
        _need(http.dialect, f"generator.http.dialect {http.dialect} without url or command", http.dialect)


def _need(package: str, what: str, extra: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{what} needs the package {package}: pip install 'tidemill[{extra}]'")


def check_folders(config: TidemillConfig) -> str:
    """ConfigError for a folder that can't be made or written."""
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
        # Also as root, and on file systems that refuse whatever their modes say, trying is what tells.
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        reason = "it is a file" if existing.is_file() else str(error.strerror)
        where = "" if existing == folder else f" in {existing}"
        raise ConfigError(f"{setting} {folder} cannot be written{where}: {reason}") from error


def check_control(config: TidemillConfig) -> Finding | str:
    """ConfigError when the control plane could not listen, or not safely; a warning for a port that is taken."""
    settings = config.control
    if not settings.enabled:
        return "not wanted"
    with contextlib.closing(
        listen(settings.host, settings.port, read_token(settings.token_file, os.environ))
    ) as listener:
        port = listener.getsockname()[1]
    if settings.port not in (0, port):
        text = f"control.port {settings.port} is taken on {settings.host}: the control plane will take a free one"
        return Finding("control plane", "warn", text, "set control.port to a free one, or to 0 for any")
    return f"{settings.host}:{settings.port or 'any port'}"


def check_models(config: TidemillConfig) -> str:
    """ConfigError when a model that is named can be none, judged by its files, or by one question to the hub."""
    trainer = config.trainer
    found = "warm_start makes it" if config.warm_start else _check_policy(config.model.path)
    if trainer.kl.coef and trainer.kl.model is not None:
        check_hub_or_folder(trainer.kl.model, "trainer.kl.model")
    if trainer.critic is not None and trainer.critic.model is not None:
        check_hub_or_folder(trainer.critic.model, "trainer.critic.model")
    for term in config.reward.terms:
        if term.name == "reward_model" and "path" in term.args:
            check_hub_or_folder(str(term.args["path"]), "path of the reward term 'reward_model'")
    return f"{config.model.path}: {found}"


def _check_policy(path: str) -> str:
    folder = check_hub_or_folder(path, "model.path")
    if folder is None:
        return "a model of the hub"
    check_tokenizer(folder)
    return f"in {folder}"


def check_model(config: TidemillConfig) -> None:
    """ConfigError when model.path can be no model, and no warm_start makes one."""
    if config.warm_start is None:
        _check_policy(config.model.path)


def _trial(config: TidemillConfig, thorough: bool, step_s: float | None) -> Iterator[Finding]:
    """The findings of the child process, as they come; that it crashes, or never ends, is a finding, too."""
    environment = {**os.environ, "TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as given,
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said,
    ):
        json.dump({"config": dump_config(config), "thorough": thorough, "step_s": step_s}, given)
        given.seek(0)
        command = [sys.executable, "-P", "-m", "deploy.checks.user_code"]
        child = subprocess.Popen(
            command, stdin=given, stdout=subprocess.PIPE, stderr=said, encoding="utf-8", env=environment
        )
        late = threading.Event()

        def give_up() -> None:
            late.set()
            child.kill()

        timer = threading.Timer(TRIAL_DEADLINE_S, give_up)
        timer.start()
        looking_at = "trial"
        try:
            for line in child.stdout or ():
                answer = json.loads(line)
                if "begins" in answer:
                    looking_at = answer["begins"]
                else:
                    yield Finding(**answer)
        finally:
            timer.cancel()
            child.kill()
            child.communicate()
        if looking_at == "end":
            return
        said.seek(0)
        lines = said.read().strip().splitlines()
        reason = lines[-1] if lines else f"exit code {child.returncode}"
        text = f"no answer within {TRIAL_DEADLINE_S:.0f} s" if late.is_set() else f"its check ended: {reason}"
        yield Finding(looking_at, "fail", one_line(f"{looking_at}: {text}"))
