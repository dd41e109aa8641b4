"""Teachers as terms: what they give is checked, mixed and sent with the score, and a failure excludes the sample."""

import asyncio
import functools
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from consumers.reward.rewards.clock import CLOCK, CallClock
from consumers.reward.rewards.teacher import teacher_server
from consumers.reward.scorer import check_reward
from deploy.checks.finding import Finding
from deploy.checks.teachers import check_teachers
from schemas.codec import Array, decode, encode
from schemas.config import TidemillConfig, parse_config
from schemas.errors import ConfigError
from schemas.messages import Score, Segment
from tests.support.models.tiny_model import make_tokenizer
from tests.support.servers.scripted_server import Answer, Request, serving
from tests.support.user_code.user_rewards import score, terms, trajectory

USERS_OWN = """
def own(completion, prompt_ids, completion_ids, *, value=-1.0, **data):
    if completion == "die":
        import os
        os._exit(3)
    return [value] * (len(prompt_ids) + len(completion_ids) - (completion == "short"))

own.teacher = True
"""


tokenizer = functools.cache(make_tokenizer)


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """Its import takes seconds, which no deadline of a request should have to cover."""
    tokenizer()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(USERS_OWN)
    return tmp_path


def own(value: float = -1.0, **term: Any) -> dict[str, Any]:
    return {"name": "mine.py:own", "args": {"value": value}, **term}


def test_a_teacher_gives_log_probabilities_of_sampled_tokens_and_no_reward(base: Path) -> None:
    sample = trajectory("46", mask=(0, 1, 0, 1), answer="46")
    held_out = msgspec.structs.replace(sample, kind="eval")
    both, alone, other = (
        score(terms(*chosen), base, sample)[0]
        for chosen in (({"name": "exact", "weight": 0.5}, own(-2.0)), (own(-2.0),), ("exact",))
    )
    assert (both.reward, both.components["exact"], alone.reward) == (0.5, 1.0, 0.0)
    assert other.teacher_logprobs is None
    for given in (both, alone):
        assert given.teacher_logprobs is not None
        assert given.teacher_logprobs.numpy().tolist() == [0.0, -2.0, 0.0, -2.0]
        assert given.components["mine.py:own"] == pytest.approx(2.0 + sample.logprobs.numpy()[[1, 3]].mean())
    (evaluated,) = score(terms("exact", own()), base, held_out)
    assert (evaluated.status, evaluated.teacher_logprobs, [*evaluated.components]) == ("ok", None, ["exact"])


def test_several_teachers_are_mixed_by_their_weights(base: Path) -> None:
    (mixed,) = score(terms(own(-1.0, weight=3.0), own(-4.0)), base, trajectory("46", mask=(0, 1)))
    assert mixed.teacher_logprobs is not None
    want = math.log(0.75 * math.exp(-1) + 0.25 * math.exp(-4))
    assert mixed.teacher_logprobs.numpy().tolist() == pytest.approx([0.0, want])


@pytest.mark.parametrize(
    ("completion", "value", "reason"),
    [
        ("short", -1.0, "mine.py:own: teacher_logprobs has 1 entries for 2 tokens"),
        ("46", float("nan"), "mine.py:own: teacher_logprobs hold NaN or infinity"),
        ("46", -math.inf, "mine.py:own: teacher_logprobs hold NaN or infinity"),
        ("46", 0.5, "mine.py:own: teacher_logprobs must be 0 or less, largest is 0.5"),
        ("die", -1.0, "mine.py:own: the worker process died"),
    ],
)
def test_a_teacher_that_fails_excludes_the_sample(base: Path, completion: str, value: float, reason: str) -> None:
    (failed,) = score(terms("exact", own(value)), base, trajectory(completion, answer="46", mask=(0, 1)))
    assert (failed.status, failed.teacher_logprobs) == ("error", None)
    assert failed.reason.startswith(reason)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (Array.of([-1.0, math.nan], "f4"), "teacher_logprobs hold NaN or infinity"),
        (Array.of([1, 2], "i4"), "teacher_logprobs must be f4, is i4"),
        (Array.of([-1.0], "f4"), "teacher_logprobs has 1 entries for 2 tokens"),
    ],
)
def test_messages_refuse_wrong_log_probabilities(given: Array, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        msgspec.structs.replace(trajectory("46", mask=(0, 1)), teacher_logprobs=given)
    if len(given) == 2:
        with pytest.raises(ValueError, match=reason):
            Score(teacher_logprobs=given)
    sent = Score(teacher_logprobs=Array.of([0.0, -2.5], "f4"))
    assert decode(encode(sent), Score) == sent


def echo(request: Request, text: str | None = None) -> Answer:
    """The answer of a server whose log-probability of each token is its id, less."""
    ids = request.body["prompt"]
    said = tokenizer().decode(ids) if text is None else text
    values = [None, *(-float(token) for token in ids[1:]), -9.0]
    return 200, {"choices": [{"text": said + "!", "logprobs": {"token_logprobs": values}}]}


def ask(url: str, segments: list[Segment] | None = None) -> np.ndarray[Any, Any]:
    async def one() -> Any:
        CLOCK.set(CallClock(10.0))
        return await teacher_server([5, 6], [7, 8], base_url=url, model="t", segments=segments or [])

    return asyncio.run(one())


def test_a_server_is_asked_for_each_row_and_again_if_it_refuses() -> None:
    with serving((503, {}), echo) as server:
        assert ask(f"{server.url}/v1").tolist() == [0, -6, -7, -8]
        assert ask(f"{server.url}/v1", [Segment(0, 3), Segment(3, 4, 0, 2)]).tolist() == [0, -6, -7, -8]
    requests = server.requests
    assert [request["prompt"] for request in requests] == [[5, 6, 7, 8]] * 2 + [[5, 6, 7], [5, 6, 8]]
    assert requests[0] | {"prompt": []} == {
        "model": "t", "prompt": [], "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    "said", [{}, [], {"choices": []}, {"choices": [{"logprobs": {"token_logprobs": [None, -1, None, -2]}}]}]
)
def test_an_answer_without_log_probabilities_is_an_error(said: Any) -> None:
    with serving((200, said)) as server, pytest.raises(ValueError, match="log-probabilities of the 4 tokens"):
        ask(f"{server.url}/v1")


def config(model: Path, *chosen: Any, **sections: Any) -> TidemillConfig:
    given: dict[str, Any] = {
        "model": {"path": str(model), "max_length": 64},
        "train": [{"name": "arithmetic", "label": "a"}, {"name": "arithmetic", "label": "b"}],
        "sampling": {"n": 1, "max_tokens": 8},
        "reward": {"terms": [*chosen]},
        "trainer": {"kl": {"coef": 1.0, "reference": "teacher"}, "advantage": {"name": "raw"}},
    }
    return parse_config({**given, **sections})


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders with the tokenizers of two models."""
    make_tokenizer().save_pretrained(tmp_path / "own")
    make_tokenizer().save_pretrained(tmp_path / "other")
    file = tmp_path / "other/tokenizer.json"
    file.write_text(file.read_text().replace('"<bos>"', '"<begin>"'))
    return tmp_path / "own", tmp_path / "other"


def test_a_teacher_with_another_tokenizer_is_refused_before_anything_starts(models: tuple[Path, Path]) -> None:
    mine, other = models
    assert check_teachers(config(mine, {"name": "teacher", "args": {"model": str(mine)}})) == str(mine)
    with pytest.raises(ConfigError, match=rf"the teacher {other} has another tokenizer than model.path {mine}"):
        check_teachers(config(mine, {"name": "teacher", "args": {"model": str(other)}}))

    def served(url: str) -> Finding | str:
        args = {"base_url": f"{url}/v1", "model": "t"}
        return check_teachers(config(mine, {"name": "teacher_server", "args": args}))

    with serving(echo) as server:
        assert served(server.url) == "t"
        assert len(server.requests[0]["prompt"]) > 60
    for answer, reason in (
        (lambda request: echo(request, "other words"), "the teacher t has another tokenizer"),
        ((404, {"error": "no model t"}), r"the teacher t: .*404"),
    ):
        with serving(answer) as server, pytest.raises(ConfigError, match=reason):
            served(server.url)
    found = served("http://127.0.0.1:9")
    assert isinstance(found, Finding)
    assert found.level == "warn"


TEACHER: dict[str, Any] = {"name": "teacher", "args": {"model": "x"}}
SERVER: dict[str, Any] = {"name": "teacher_server", "args": {"base_url": "http://t/v1", "model": "x"}}


@pytest.mark.parametrize(
    ("chosen", "sections", "reason"),
    [
        ([TEACHER], {"trainer": {"advantage": {"name": "raw"}}}, "set trainer.kl.reference to teacher"),
        (["exact"], {}, "trainer.kl.reference teacher needs a term teacher"),
        ([TEACHER], {"trainer": {"kl": {"reference": "teacher"}, "advantage": {"name": "raw"}}}, "coef above 0"),
        ([{**TEACHER, "weight": 0.0}], {}, "the weight of a teacher must be above 0"),
        (
            [SERVER],
            {"sampling": {"n": 1, "max_tokens": 8, "temperature": 0.7}},
            "must be 1 with teacher_server",
        ),
        ([{**TEACHER, "datasets": ["a"]}], {}, "no term applies to the dataset 'b'"),
        (
            [TEACHER],
            {"eval": {"dataset": {"name": "arithmetic", "label": "a"}, "sampling": {"max_tokens": 8}}},
            "no term applies to the dataset 'a', so its samples would have no reward",
        ),
    ],
)
def test_settings_must_fit_a_teacher(tmp_path: Path, chosen: list[Any], sections: dict[str, Any], reason: str) -> None:
    named = [{"name": term} if isinstance(term, str) else term for term in chosen]
    with pytest.raises(ConfigError, match=reason):
        config(tmp_path, *named, **sections)


def test_arguments_of_teachers_are_checked(tmp_path: Path) -> None:
    for term, reason in (
        ({**TEACHER, "args": {"model": "x", "dtype": "int8"}}, "'int8' is not allowed, must be 'float32', 'bfloat16'"),
        ({**TEACHER, "args": {"model": "x", "batch_tokens": 0}}, "'batch_tokens': 0 is not allowed, must be greater"),
        ({**SERVER, "args": {"base_url": "teacher:8000", "model": "x"}}, "must begin with http"),
        ({**SERVER, "args": {"base_url": "http://t/v1"}}, "argument 'model' is required and missing"),
    ):
        with pytest.raises(ConfigError, match=reason):
            check_reward(terms(term), tmp_path)


def test_weights_and_unrewarded_datasets_are_those_of_the_terms(tmp_path: Path) -> None:
    found = config(
        tmp_path, {**TEACHER, "weight": 0.5}, {**SERVER, "datasets": ["b"]}, {"name": "exact", "datasets": ["b"]}
    )
    assert (found.teacher_weights, found.unrewarded) == ({"a": 0.5, "b": 1.5}, {"a"})
    assert not found.trainer.has_second_model
