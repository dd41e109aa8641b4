"""What a trainer publishes, without a model: weights that change from version to version."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save

from broker.client import Broker
from broker.flow.fencing import term_number
from broker.weights.delta_writer import DeltaWriter
from broker.weights.transports import PeerOrigin, make_transport
from schemas.messages import Manifest, TensorSpec

SPECS = [TensorSpec("a", "bfloat16", [64, 64]), TensorSpec("b", "bfloat16", [0]), TensorSpec("c", "bfloat16", [333])]


class ChangingWeights:
    """What a trainer publishes: random weights that change a little, or wholly, from version to version."""

    def __init__(self, broker: Broker, folder: Path, kind: str, leader_term: str, *, max_chain: int = 3, keep: int = 2):
        self._broker, self._folder, self._leader_term = broker, folder / "out", leader_term
        self._folder.mkdir(exist_ok=True)
        self._transport = make_transport(broker.connection, kind, self._folder)
        if isinstance(self._transport, PeerOrigin):
            broker.weights.serve(self._transport)
        self._publication = broker.weight_publication(self._transport, keep, DeltaWriter(self._folder, max_chain))
        self.bits: npt.NDArray[np.int16] = np.random.default_rng(0).integers(0, 1000, 64 * 64 + 333, dtype=np.int16)

    def close(self) -> None:
        self._transport.close()

    def publish(self, version: int, *, changed: int = 9) -> Manifest:
        """Change some elements and publish; the manifest that generators see."""
        rng = np.random.default_rng(version)
        self.bits[rng.choice(self.bits.size, changed, replace=False)] += rng.integers(1, 9999, changed, dtype=np.int16)
        self.offer(version)
        newest = self._broker.weights.newest()
        assert newest is not None
        assert newest.version == version
        return newest

    def offer(self, version: int) -> None:
        file = self._folder / f"part-{version}-t{term_number(self._leader_term)}"
        file.write_bytes(save(self.tensors(), {"format": "pt"}))
        self._publication.publish(
            file, version=version, step=version, leader_term=self._leader_term, tensors=SPECS, probe=None
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        bits = torch.from_numpy(self.bits.copy()).view(torch.bfloat16)
        return {"a": bits[: 64 * 64].reshape(64, 64), "b": bits[:0], "c": bits[64 * 64 :]}

    def is_at(self, path: Path) -> bool:
        """Whether the file holds these weights, to the bit."""
        found = load_file(path)
        return all(torch.equal(found[n].view(torch.int16), t.view(torch.int16)) for n, t in self.tensors().items())
