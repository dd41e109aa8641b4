"""The check of teachers before a run starts: whether they have the policy's tokenizer, since they get its token ids."""

from pathlib import Path
from typing import Any

from deploy.checks.finding import Finding
from deploy.checks.model_files import local_folder
from schemas.config import RewardTerm, TidemillConfig
from schemas.errors import ConfigError
from schemas.model_folder import read_json, read_vocabulary

ANSWER_S = 60.0
"""How long a server may take to answer: for its first log-probabilities vLLM compiles, which takes half a minute."""
PROBE = "The sum of 12345 and 678 is 13023.\n\tdef f(x): return x**2  # größer, été, 你好, привет"


def check_teachers(config: TidemillConfig) -> Finding | str:
    """Raise ConfigError for a teacher with another tokenizer. Warn about one that cannot be asked."""
    terms = [term for term in config.reward.terms if term.is_teacher]
    own = _tokenizer_file(config.model.path)
    if own is None:
        return "the tokenizers are compared when samples come"
    problems = list[str]()
    for term in terms:
        if term.name == "teacher_self":
            continue
        if term.name == "teacher_server":
            problems += filter(None, [_ask_server(term, own, config)])
            continue
        theirs = _tokenizer_file(str(term.args["model"]))
        if theirs is not None and read_vocabulary(theirs) != read_vocabulary(own):
            raise _refusal(term.args["model"], config)
    if problems:
        return Finding("teachers", "warn", problems[0], "samples are excluded while a teacher does not answer")
    return ", ".join(str(term.args.get("model", "the policy itself")) for term in terms)


def _refusal(teacher: Any, config: TidemillConfig) -> ConfigError:
    return ConfigError(
        f"the teacher {teacher} has another tokenizer than model.path {config.model.path}: a teacher reads the policy's"
        " token ids, take one of the same family"
    )


def _tokenizer_file(path: str) -> Path | None:
    """Return tokenizer.json of a folder or a cached model of the Hub; None if there is no such file."""
    folder = local_folder(path)
    return folder / "tokenizer.json" if folder and (folder / "tokenizer.json").is_file() else None


def _ask_server(term: RewardTerm, file: Path, config: TidemillConfig) -> str | None:
    """Have a server say what text it reads in token ids. Returns why it cannot be asked; ConfigError if it is wrong."""
    import httpx
    from tokenizers import Tokenizer

    from consumers.reward.rewards.http import REFUSED, key_headers
    from consumers.reward.rewards.teacher import echo_request, echoed_logprobs

    tokenizer = Tokenizer.from_file(str(file))
    special = {token["id"] for token in read_json(file).get("added_tokens", [])}
    ids = tokenizer.encode(PROBE, add_special_tokens=False).ids
    ids.append(max(read_vocabulary(file).keys() - special))
    url = str(term.args["base_url"]).rstrip("/") + "/completions"

    try:
        body, headers = echo_request(term.args["model"], ids), key_headers(term.args.get("api_key_env"))
        response = httpx.post(url, json=body, headers=headers, timeout=ANSWER_S)
        if response.status_code in REFUSED:
            return f"{url} answers {response.status_code}"
        if not response.is_success:
            raise ValueError(f"{url} answers {response.status_code}: {response.text[:200]!r}")
        answer = response.json()
        echoed_logprobs(url, answer, ids)
    except httpx.TransportError as error:
        return f"{url} cannot be reached: {error or type(error).__name__}"
    except ValueError as error:
        raise ConfigError(f"the teacher {term.args['model']}: {error}") from error
    if not str(answer["choices"][0].get("text")).startswith(tokenizer.decode(ids)):
        raise _refusal(term.args["model"], config)
    return None
