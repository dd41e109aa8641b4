"""The playground's route: questions to the current policy, which generators answer with spare capacity."""

import asyncio
import secrets

from fastapi import APIRouter

from deploy.control_plane.routes.context import Context, InContext, poll
from deploy.control_plane.routes.decoding import Decode, pieces, plain
from deploy.control_plane.web.refusal import Refusal
from schemas.control_api.trajectories import Generated, GeneratedReply, GenerateRequest, TokenTable
from schemas.messages import ChatMessage, Question, QuestionAnswer, Reply, Sampling

router = APIRouter(prefix="/v1", tags=["orders"])
MOST_ASKED = 32
"""Questions that wait for an answer at once."""
PAUSED = ("paused", "pausing", "stopping", "stopped", "finished", "failed", "unreachable")


@router.post("/generate")
async def generate(context: InContext, body: GenerateRequest) -> Generated:
    """Ask the current policy a question. A generator answers if it has spare capacity."""
    if not context.plan.playground:
        raise Refusal(403, "the playground is off beyond this machine: set control.playground: true")
    if (body.prompt is None) == (body.messages is None):
        raise Refusal(422, "give one of prompt and messages")
    state = context.poller.latest.state
    if state in PAUSED:
        raise Refusal(409, f"the run is {state}: no generator answers")
    if context.questions >= MOST_ASKED:
        raise Refusal(503, f"{MOST_ASKED} questions wait for their answers: try again")
    context.questions += 1
    try:
        answer = await _answer(context, body)
    finally:
        context.questions -= 1
    if answer is None:
        text = f"no generator had room within {body.wait_s:g} s: try again, or lower concurrency for a while"
        raise Refusal(503, text)
    if answer.error:
        raise Refusal(422, answer.error)
    decode = await asyncio.to_thread(lambda: context.decoder)
    return Generated(generator=answer.generator, replies=[_reply(one, decode) for one in answer.replies])


async def _answer(context: Context, body: GenerateRequest) -> QuestionAnswer | None:
    """Ask the policy and wait for its answer, without a thread: it may take minutes, and orders need the threads."""
    id, position = await asyncio.to_thread(_ask, context, body)

    def look() -> QuestionAnswer | None:
        nonlocal position
        answer, position = context.broker.questions.find_answer(id, position)
        return answer

    return await poll(look, lambda answer: answer is not None, body.wait_s)


def _ask(context: Context, body: GenerateRequest) -> tuple[str, bytes]:
    """Queue the question; return its id, and the position after which its answer comes."""
    questions = context.broker.questions
    sampling = Sampling(temperature=body.temperature, top_p=body.top_p, max_tokens=body.max_tokens)
    messages = [ChatMessage(one.role, one.content) for one in body.messages] if body.messages else None
    until = context.broker.heartbeats.read_clock() + body.wait_s
    id, position = secrets.token_hex(8), questions.position()
    question = Question(id=id, until=until, sampling=sampling, n=body.n, text=body.prompt, messages=messages)
    if not questions.ask(question):
        raise Refusal(503, "too many questions wait for a generator with room: try again")
    return id, position


def _reply(reply: Reply, decode: Decode | None) -> GeneratedReply:
    ids = reply.tokens.numpy().tolist()
    table = TokenTable(
        id=ids,
        text=None if decode is None else pieces(decode, ids),
        logprob=plain(reply.logprobs.numpy().tolist()),
        version=reply.versions.numpy().tolist(),
        mask=[1] * len(ids),
    )
    return GeneratedReply(text=reply.text, finish=reply.finish, tokens=table)
