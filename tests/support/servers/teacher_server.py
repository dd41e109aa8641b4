"""An inference server with one causal model: ``python -m tests.support.servers.teacher_server FOLDER PORT``.

It answers OpenAI's completions for a prompt of token ids, with ``echo`` and ``logprobs``, and nothing else.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from schemas.system import guard


def serve(folder: Path, port: int = 0) -> ThreadingHTTPServer:
    """A server that listens; ``serve_forever`` answers."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/completions"
            assert (body["echo"], body["max_tokens"]) == (True, 1)
            self.reply(answer(body["prompt"]))

        def reply(self, said: dict[str, Any]) -> None:
            content = json.dumps(said).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: Any) -> None:
            pass

    def answer(ids: list[int]) -> dict[str, Any]:
        with torch.no_grad():
            logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)
        new = int(logprobs[-1].argmax())
        values = [None, *(float(logprobs[t, token]) for t, token in enumerate([*ids[1:], new]))]
        text = tokenizer.decode([*ids, new], skip_special_tokens=True)
        return {"choices": [{"text": text, "logprobs": {"token_logprobs": values}}]}

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


if __name__ == "__main__":
    guard.prctl(guard.PR_SET_PDEATHSIG, 9)
    torch.set_num_threads(1)
    serve(Path(sys.argv[1]), int(sys.argv[2])).serve_forever()
