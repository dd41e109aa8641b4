"""An MCP server with one tool, ``search``, over the passages of a file: the ranking is BM25, in memory.

BM25 as in Robertson and Zaragoza 2009, "The Probabilistic Relevance Framework", section 3: each word of the query adds
its inverse document frequency times how often it stands in a passage, saturated by K1 and normed by length through B.
"""

import json
import math
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

from mcp.server.mcpserver import MCPServer

K1, B = 1.2, 0.75
server = MCPServer("search")


class Passages:
    """Passages of a file with JSON lines of ``title`` and ``text``, and where each word stands."""

    def __init__(self, file: Path) -> None:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        self.shown = [f"{row['title']}: {row['text']}" for row in rows]
        counts = [Counter(_words(text)) for text in self.shown]
        self.lengths = [sum(count.values()) for count in counts]
        self.mean = sum(self.lengths) / len(self.lengths)
        self.places: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for number, count in enumerate(counts):
            for word, times in count.items():
                self.places[word].append((number, times))

    def best(self, query: str, most: int) -> list[str]:
        """Return the passages that match the query best, the best first; none that shares no word with it."""
        scores: Counter[int] = Counter()
        for word in set(_words(query)):
            found = self.places.get(word, [])
            rarity = math.log(1 + (len(self.shown) - len(found) + 0.5) / (len(found) + 0.5))
            for number, times in found:
                norm = K1 * (1 - B + B * self.lengths[number] / self.mean)
                scores[number] += rarity * times * (K1 + 1) / (times + norm)
        return [self.shown[number] for number, _ in scores.most_common(most)]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


@server.tool()
def search(query: str, passages: int = 3) -> str:
    """Searches an encyclopedia, and returns the passages that match the query best."""
    found = known.best(query, min(max(passages, 1), 10))
    return "\n".join(f"({place}) {text}" for place, text in enumerate(found, 1)) or "nothing found"


if __name__ == "__main__":
    known = Passages(Path(__file__).with_name(sys.argv[1] if len(sys.argv) > 1 else "passages.jsonl"))
    server.run("stdio")
