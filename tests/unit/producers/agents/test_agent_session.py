"""The session of one episode: what is sampled, recorded and kept of an agent's calls, whatever becomes of them."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from producers.agents.capacity import EngineCapacity
from producers.agents.episode import AgentEpisode, EpisodeServices
from producers.agents.outcomes import FailureAlarm
from producers.agents.protocol import CallRequest, SessionError
from producers.agents.session import PolicyHandle, Session
from producers.agents.sessions import Sessions
from producers.agents.workers.notes import Notes
from producers.agents.workers.protocol import AgentJob, AgentResult, Kind
from producers.conversation import conversation
from producers.conversation.chat_template import ChatTemplate
from producers.conversation.conversation import Conversation
from producers.conversation.images import EpisodeImages, ImageLimits
from producers.conversation.parsing.factory import AnswerParser
from producers.engines.base import Engine
from producers.tokenizer import HfTokenizer
from producers.workflows.base import RolloutContext, SaveDone
from producers.workflows.trajectory_builder import SampledCompletion
from schemas.config import AgentsConfig
from schemas.errors import BrokerLost, InfraError
from schemas.messages import Partial, Sampling
from tests.support.models.pictures import PLACES, picture, user, vision_tokenizer
from tests.support.producers.played_episodes import SpeakingEngine, chat_task, chat_tokenizer

pytestmark = pytest.mark.timeout(30)

Plays = Callable[[Session, AgentJob], Awaitable[AgentResult]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    return chat_tokenizer(tmp_path_factory.mktemp("model"))


class Scene:
    """A session over an engine that answers with the number of its request; ``...`` waits until it is aborted."""

    def __init__(
        self,
        tokenizer: HfTokenizer,
        *answers: str,
        saved: Partial | None = None,
        cut: int = 0,
        images: EpisodeImages | None = None,
        **sampling: Any,
    ) -> None:
        following = iter(answers)
        self.engine = SpeakingEngine(tokenizer, lambda _: next(following), cut=cut)
        self.states: list[Partial] = []
        self.may_save = asyncio.Event()
        self.may_save.set()
        parser = AnswerParser("hermes", None, tokenizer, vllm=False)
        policy = PolicyHandle(self.engine, parser, EngineCapacity(8), 4096, 50, tokenizer)
        conversation = Conversation(ChatTemplate(tokenizer), images=images)
        self.session = Session(policy, conversation, Sampling(max_tokens=100, **sampling), saved, self._save)

    def _save(self, partial: Partial) -> Awaitable[None]:
        async def save() -> None:
            await self.may_save.wait()
            self.states.append(partial)

        return save()

    def ask(self, *texts: str, n: int = 1) -> asyncio.Task[Any]:
        """A request whose messages are these, of user and assistant in turns."""
        return asyncio.create_task(self.session.complete(CallRequest(messages=said(*texts), n=n)))


class Runner:
    """An AgentRunner whose agents call their session without HTTP: ``play`` makes the result of each attempt."""

    keep_requests = False

    def __init__(self, sessions: Sessions, play: Plays) -> None:
        self._sessions, self._play = sessions, play

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def run(self, job: AgentJob, notes: Notes) -> AgentResult:
        return await self._play(self._sessions.find(job.api_key), job)


def episode(tokenizer: HfTokenizer, engine: Engine, play: Plays) -> tuple[AgentEpisode, RolloutContext]:
    """The episode of an agent that plays so, and its rollout."""
    settings, sessions = AgentsConfig(), Sessions()
    policy = PolicyHandle(
        engine, AnswerParser("hermes", None, tokenizer, False), EngineCapacity(8), 4096, 50, tokenizer
    )
    template, limits = ChatTemplate(tokenizer), ImageLimits(count=0, file_bytes=0, stored_bytes=0)
    services = EpisodeServices(
        settings, policy, template, sessions, Runner(sessions, play), FailureAlarm(1.0), "http://here", limits
    )
    rollout = RolloutContext(engine, tokenizer, chat_task("Hello"), range(1))
    return AgentEpisode(services, rollout, 0), rollout


def said(*texts: str) -> list[dict[str, Any]]:
    """Messages with these texts, of user and assistant in turns."""
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]


async def turns() -> None:
    """Let all tasks and threads that are ready run."""
    for _ in range(20):
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("name", ["self", "messages", "tokenize"])
async def test_an_argument_that_no_template_can_have_is_named(tokenizer: HfTokenizer, name: str) -> None:
    messages = [{"role": "user", "content": "?"}]
    with pytest.raises(SessionError, match=f"a chat template has no argument {name}") as caught:
        await Scene(tokenizer).session.complete(CallRequest(messages=messages, template_args={name: 1}))
    assert caught.value.status == 400


async def test_a_text_that_cannot_fit_is_not_tokenized(tokenizer: HfTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    play = Scene(tokenizer)
    monkeypatch.setattr(tokenizer, "encode", lambda text: pytest.fail("it was"))
    with pytest.raises(SessionError, match="4096 tokens, the prompt has at least 10000") as caught:
        await play.ask("x" * 10_000 * tokenizer.longest_token)
    assert (caught.value.code, play.session.limit) == ("context_length_exceeded", "length")
    messages = [{"role": "user", "content": "x" * 10_000 * tokenizer.longest_token}]
    assert await play.session.count_tokens(CallRequest(messages=messages)) == 10_000


async def test_calls_and_the_tools_between_them_are_noted(tokenizer: HfTokenizer) -> None:
    play = Scene(tokenizer, '<tool_call>{"name": "add", "arguments": {}}</tool_call>', "three")
    noted: list[tuple[str, str]] = []
    play.session.note = lambda kind, name, *_: noted.append((kind, name))
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    await play.session.complete(CallRequest(messages=[{"role": "user", "content": "1+2?"}], tools=tools))
    await play.ask("1+2?", "", "3")
    assert noted == [("chat", ""), ("tool", "add"), ("chat", "")]


async def test_an_answer_leaves_when_it_is_saved_and_not_before(tokenizer: HfTokenizer) -> None:
    play = Scene(tokenizer, "one")
    play.may_save.clear()
    asked = play.ask("Say one")
    await turns()
    assert not asked.done()
    play.may_save.set()
    (answer,) = await asked
    assert [call.tokens.numpy().tolist() for call in play.states[-1].calls] == [answer.ids]


async def test_answers_of_one_agent_are_saved_at_the_same_time(tokenizer: HfTokenizer) -> None:
    play = Scene(tokenizer, "one", "two")
    play.may_save.clear()
    asked = [play.ask("Say one"), play.ask("Say two")]
    await turns()
    assert play.session.conversation.calls == 2
    play.may_save.set()
    await asyncio.gather(*asked)


@pytest.mark.parametrize("while_it", ["is sampled", "is saved"])
async def test_a_call_that_nobody_waits_for_any_more_is_no_call(tokenizer: HfTokenizer, while_it: str) -> None:
    play = Scene(tokenizer, "..." if while_it == "is sampled" else "one", "two")
    play.may_save.clear()
    asked = play.ask("Say something")
    await turns()
    asked.cancel()
    await asyncio.wait({asked})
    assert (play.session.counts.calls, play.session.conversation.calls) == (0, 0)
    play.may_save.set()
    (answer,) = await play.ask("Say something")
    (call,) = play.states[-1].calls
    assert call.tokens.numpy().tolist() == answer.ids
    again = Scene(tokenizer, saved=play.states[-1])
    assert (await again.ask("Say something"))[0].ids == answer.ids
    assert again.session.counts.replayed == 1


async def test_equal_requests_whose_answer_is_lost_get_the_same_answer_again(tokenizer: HfTokenizer) -> None:
    before = Scene(tokenizer, "alpha", "beta", "gamma")
    for _ in range(3):
        await before.ask("go")
    scene = Scene(tokenizer, saved=before.session.partial())
    tasks = [scene.ask("go") for _ in range(3)]
    received = [(await task)[0] for task in tasks]
    assert {answer.text for answer in received} == {"alpha", "beta", "gamma"}
    for lost in received[:2]:
        scene.session.forget(lost.call)
        assert (await scene.ask("go"))[0].text == lost.text
    texts = [tokenizer.decode(call.tokens.numpy().tolist()) for call in scene.session.partial().calls]
    assert len(texts) == 3
    assert len(set(texts)) == 3
    assert scene.session.counts.replayed == 5


async def test_equal_calls_at_the_same_time_differ_in_seed(tokenizer: HfTokenizer) -> None:
    scene = Scene(tokenizer, "one", "two", "three", seed=7)
    await asyncio.gather(scene.ask("go"), scene.ask("go"))
    await scene.ask("go")
    assert len(set(scene.engine.seeds)) == 3


async def test_a_cancelled_call_gives_its_places_in_the_engine_back(tokenizer: HfTokenizer) -> None:
    play = Scene(tokenizer, *["..."] * 8, "nine")
    asked = [play.ask(f"Wait {at}") for at in range(8)]
    await turns()
    ninth = play.ask("Say nine")
    await turns()
    assert not ninth.done()
    asked[0].cancel()
    assert (await ninth)[0].text == "nine"
    for other in asked:
        other.cancel()
    await asyncio.wait(asked)


def test_names_of_metrics_do_not_fill_the_memory(tokenizer: HfTokenizer) -> None:
    session = Scene(tokenizer).session
    session.add_metrics({"moves": 3.0})
    session.add_metrics({f"metric-{number}": 1.0 for number in range(5000)} | {"moves": 4.0})
    with pytest.raises(SessionError, match="more than 65536 characters"):
        session.add_metrics({f"another-{number}": 1.0 for number in range(5000)})
    assert (session.metrics["moves"], len(session.metrics)) == (4.0, 5001)


async def test_a_session_that_ends_answers_410_and_records_nothing_more(tokenizer: HfTokenizer) -> None:
    play = Scene(tokenizer, "one", "...")
    await play.ask("Say one")
    asked = play.ask("Wait")
    await turns()
    play.session.end()
    await asyncio.wait({asked})
    assert asked.cancelled()
    assert play.session.conversation.calls == 1
    with pytest.raises(SessionError) as error:
        await play.ask("Say two")
    assert error.value.status == 410


async def test_an_aborted_call_is_handed_over_as_far_as_it_is_without_an_answer(
    tokenizer: HfTokenizer,
) -> None:
    play = Scene(tokenizer, "one", "...abcdefgh", cut=5)
    await play.ask("Say one")
    asked = play.ask("Say one", "one", "And now")
    await turns()
    await play.engine.abort_all()
    await play.session.interrupted.wait()
    await play.session.settle(5)
    assert not asked.done()
    handed = play.session.partial()
    assert [(call.finish, len(call.tokens)) for call in handed.calls] == [("stop", 4), ("abort", 5)]
    play.session.end()
    await asyncio.wait({asked})

    successor = Scene(tokenizer, "abcdefgh", saved=handed)
    (first,) = await successor.ask("Say one")
    (second,) = await successor.ask("Say one", "one", "And now")
    assert (first.text, second.text) == ("one", "abcdefgh")
    assert successor.engine.prefixes == [handed.calls[1].tokens.numpy().tolist()]
    assert successor.session.counts.replayed == 1


async def test_a_hand_over_waits_for_what_was_sampled(tokenizer: HfTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    play = Scene(tokenizer, "one")
    reading = asyncio.Event()
    to_thread = asyncio.to_thread

    async def slowly(function: Any, *given: Any) -> Any:
        found = await to_thread(function, *given)
        if function == play.session._parse:
            reading.set()
            await asyncio.sleep(0.1)
        return found

    monkeypatch.setattr(asyncio, "to_thread", slowly)
    asked = play.ask("Say one")
    await reading.wait()
    await play.session.settle(5)
    assert len(play.session.partial().calls) == 1
    await asked


async def test_a_stop_string_is_sampled_and_not_shown_and_the_next_turn_joins(tokenizer: HfTokenizer) -> None:
    scene = Scene(tokenizer, "one.two", "three")
    (first,) = await scene.session.complete(CallRequest(messages=said("Count"), stop=["!", "."]))
    assert (first.parsed.content, first.text, first.stop, first.finish) == ("one", "one", ".", "stop")
    assert tokenizer.decode_all(first.ids) == "one."
    (second,) = await scene.ask("Count", first.parsed.content or "", "And then")
    assert (second.text, second.stop) == ("three", None)
    sample = scene.session.conversation.sample(0, "stop")
    assert scene.session.begun == {"first": 1, "joined": 1}
    trained = [token for token, mask in zip(sample.tokens, sample.loss_mask, strict=True) if mask]
    assert trained == first.ids + second.ids
    again = Scene(tokenizer, saved=scene.states[-1])
    (same,) = await again.session.complete(CallRequest(messages=said("Count"), stop=["!", "."]))
    assert (same.text, same.ids) == ("one", first.ids)


async def test_a_stop_string_of_the_task_is_shown(tokenizer: HfTokenizer) -> None:
    scene = Scene(tokenizer, "one.two", stop=["."])
    assert (await scene.ask("Count"))[0].text == "one."


@pytest.mark.parametrize("ending", [False, True])
async def test_an_engine_that_fails_ends_the_generator_and_not_the_sample(tokenizer: HfTokenizer, ending: bool) -> None:
    def fails(_: str) -> str:
        if ending:
            rollout.interrupted.set()
        raise InfraError("the engine died")

    async def play(session: Session, job: AgentJob) -> AgentResult:
        with pytest.raises(InfraError):
            await session.complete(CallRequest(messages=said("Hello")))
        return AgentResult("raised", error="InternalServerError: 503")

    played, rollout = episode(tokenizer, SpeakingEngine(tokenizer, fails), play)
    if not ending:
        with pytest.raises(InfraError, match="the engine died"):
            await played.play()
        return
    sample = await played.play()
    assert isinstance(sample, SampledCompletion)
    assert sample.finish == "abort"


@pytest.mark.parametrize("end", ["returned", "died"])
async def test_an_answer_that_nobody_received_is_not_trained_when_the_agent_is_done(
    tokenizer: HfTokenizer, end: Kind
) -> None:
    engine = SpeakingEngine(tokenizer, lambda prompt: "two" if "again" in prompt else "one")

    async def play(session: Session, job: AgentJob) -> AgentResult:
        await session.complete(CallRequest(messages=said("Hello")))
        (lost,) = await session.complete(CallRequest(messages=said("Hello again")))
        session.watch(lambda: [lost.call])
        return AgentResult("returned" if job.attempt else end, 1.0)

    played, _ = episode(tokenizer, engine, play)
    sample = await played.play()
    assert isinstance(sample, SampledCompletion)
    assert tokenizer.decode_all(sample.tokens).count("one") == 1
    assert "two" not in tokenizer.decode_all(sample.tokens)
    assert len(engine.prompts) == 2, "an agent whose process died asks for it again"


@pytest.mark.parametrize("beginning", ["chatcmpl-", "cmpl-", "msg_", "resp_"])
async def test_an_agent_rewards_an_answer_by_the_id_of_its_protocol(tokenizer: HfTokenizer, beginning: str) -> None:
    async def play(session: Session, job: AgentJob) -> AgentResult:
        (answer,) = await session.complete(CallRequest(messages=said("Hello")))
        return AgentResult("returned", turns={beginning + answer.id.removeprefix("chatcmpl-"): 0.5})

    played, _ = episode(tokenizer, SpeakingEngine(tokenizer, lambda _: "one"), play)
    sample = await played.play()
    assert isinstance(sample, SampledCompletion), sample
    assert sample.reward == 0.5


async def test_an_agent_whose_process_dies_twice_gets_all_recorded_answers(tokenizer: HfTokenizer) -> None:
    engine = SpeakingEngine(tokenizer, lambda _: "one")

    async def play(session: Session, job: AgentJob) -> AgentResult:
        asked = [["Hello"], ["Hello", "one", "And then"]]
        for texts in asked[:1] if job.attempt == 1 else asked:
            await session.complete(CallRequest(messages=said(*texts)))
        return AgentResult("returned", 1.0) if job.attempt == 2 else AgentResult("died", error="SIGKILL")

    played, _ = episode(tokenizer, engine, play)
    sample = await played.play()
    assert isinstance(sample, SampledCompletion), sample
    assert (len(engine.prompts), sample.metrics["replayed"]) == (2, 2.0)


async def test_a_broker_that_is_away_ends_no_episode_and_the_answer_is_no_call(tokenizer: HfTokenizer) -> None:
    async def fail(_: Partial) -> bool:
        raise BrokerLost("it is away")

    scene = Scene(tokenizer, "one", "two")
    save, scene.session._save = scene.session._save, fail
    with pytest.raises(BrokerLost):
        await scene.ask("Say one")
    assert scene.session.broken is None
    assert (scene.session.counts.calls, scene.session.conversation.calls) == (0, 0)
    scene.session._save = save
    assert (await scene.ask("Say one"))[0].text == "two"
    assert len(scene.states[-1].calls) == 1


async def test_notes_are_kept_when_they_are_saved_and_only_so_many(tokenizer: HfTokenizer) -> None:
    play = Scene(tokenizer)
    play.may_save.clear()
    keeping = asyncio.ensure_future(play.session.notes.keep("order", '"A1"'))
    await turns()
    assert not keeping.done()
    play.may_save.set()
    await keeping
    assert play.states[-1].notes == {"order": '"A1"'}
    with pytest.raises(Exception, match="1048576"):
        await play.session.notes.keep("page", "x" * (1 << 20))
    assert list(play.session.notes) == ["order"]


async def test_each_call_is_digested_once_and_no_more(tokenizer: HfTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bytes] = []
    real = conversation.digest_key
    monkeypatch.setattr(conversation, "digest_key", lambda digest, n: made.append(digest) or real(digest, n))

    play = Scene(tokenizer, *["one"] * 20)
    texts = ["Say one"]
    for _ in range(20):
        await play.ask(*texts)
        texts += ["one", "Again"]
    assert len(play.states[-1].calls) == 20
    assert len(made) == 20


async def test_a_session_that_nobody_saves_answers_all_the_same(tokenizer: HfTokenizer) -> None:
    play = Scene(tokenizer, "one")
    play.session._save = lambda _: SaveDone()
    assert (await play.ask("Say one"))[0].text == "one"


async def test_a_call_is_answered_from_the_record_if_it_shows_the_same_images(tmp_path: Path) -> None:
    tokenizer = vision_tokenizer(tmp_path)

    def scene_with(*answers: str, saved: Partial | None = None) -> Scene:
        limits = ImageLimits(count=2, file_bytes=1 << 20, stored_bytes=1 << 20)
        return Scene(tokenizer, *answers, saved=saved, images=EpisodeImages(PLACES, limits))

    red, blue = (CallRequest(messages=[user("?", picture(color))]) for color in ("red", "blue"))
    first = scene_with("It is red")
    (answer,) = await first.session.complete(red)
    assert len(first.engine.images[0]) == 1
    again = scene_with("It is blue", saved=first.states[-1])
    (same,) = await again.session.complete(red)
    (other,) = await again.session.complete(blue)
    assert (same.ids, same.prompt_ids) == (answer.ids, other.prompt_ids)
    assert (other.text, again.session.counts.replayed, len(again.engine.images)) == ("It is blue", 1, 1)
    assert await again.session.count_tokens(red) == len(answer.prompt_ids)
    wrong = CallRequest(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": "http://x"}]}])
    with pytest.raises(SessionError, match=r"messages\[0\]: the image http://x is not fetched") as caught:
        await again.session.complete(wrong)
    assert caught.value.status == 400
