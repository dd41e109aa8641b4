"""Users' questions to the current policy, which a generator with free capacity answers beside its work.

Nothing depends on them: a question that no generator takes in time is deleted, and a lost one is not reported.
"""

from broker.connection.connection import RunData
from broker.connection.stream_pages import entries_in
from schemas.codec import encode, try_decode
from schemas.messages import Question, QuestionAnswer

MOST_WAITING = 16
MOST_ANSWERS, MOST_BYTES = 64, 16 * 2**20
LARGEST = 1 << 22


class Questions(RunData):
    """The questions of a run, for both sides."""

    def ask(self, question: Question) -> bool:
        """Queue a question; False if too many are waiting."""
        body = encode(question, LARGEST)
        return bool(self._connection.run_script("ask_policy", body, MOST_WAITING) == b"ok")

    def position(self) -> bytes:
        """Return the position of the newest answer: read it before you ask, for ``find_answer``."""
        return self._connection.newest_entry("looking at answers", self._keys.answers)

    def find_answer(self, id: str, position: bytes) -> tuple[QuestionAnswer | None, bytes]:
        """Look for the answer to a question after a position, without waiting; with the position for the next look."""
        found = self._connection.run_command(
            "looking for an answer", "xread", {self._keys.answers: position}, MOST_ANSWERS
        )
        for _, (position, fields) in entries_in(found):
            answer = try_decode(fields.get(b"b", b""), QuestionAnswer, LARGEST)
            if answer is not None and answer.id == id:
                return answer, position
        return None, position

    def take(self) -> Question | None:
        """Take the oldest question, for this generator alone; None if there is none."""
        body = self._connection.run_script("take_question")
        return None if body is None else try_decode(body, Question, LARGEST)

    def answer(self, answer: QuestionAnswer) -> None:
        """Publish the answer to a question."""
        self._connection.run_script("answer_question", encode(answer, LARGEST), MOST_ANSWERS, MOST_BYTES)
