"""How new weights reach the generators: the transports, and what each of them can be told."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from schemas.config.base import Seconds, Section, UserPath


def _switch(value: Any) -> Any:
    """Undo YAML's reading of a plain on or off as true or false."""
    return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


class PeerConfig(Section):
    """Serving weights to one another, with the transport peer: the trainer, and each generator what it has fetched."""

    host: str | None = Field(
        None,
        min_length=1,
        description="Address of this machine for the others, by default the one from which it reaches the broker. Where"
        " the broker is on the same machine that is 127.0.0.1: set it if generators are elsewhere.",
    )
    port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Port to serve weights at, 0: any free one. Several services of one machine need 0.",
    )
    uplinks: int = Field(
        2,
        ge=1,
        description="How many generators the trainer gives each part of a version to while others want it too; they"
        " give it to the rest.",
    )
    streams: int = Field(4, ge=1, le=32, description="Connections over which a generator fetches at once.")


class NcclConfig(Section):
    """Broadcasts of new weights, with the transport nccl; whoever takes no part fetches them from peers."""

    backend: Literal["auto", "nccl", "gloo"] = Field(
        "auto",
        description="What carries a broadcast: nccl between GPUs, gloo between processors. auto: what the trainer's"
        " machine has; a generator without it fetches from peers.",
    )
    roll_s: Seconds = Field(
        1.0,
        description="How long a version waits for generators to answer that they want it. Not the whole time, once all"
        " that took part before have answered.",
    )
    silence_s: float = Field(
        5.0, ge=1.0, allow_inf_nan=False, description="A broadcast in which nothing moves for so long is given up."
    )


class PublishConfig(Section):
    """Publication of new weights to the generators."""

    transport: Literal["file", "redis", "peer", "nccl"] = Field(
        "file",
        description="file: safetensors in a folder that all can read. redis: chunks in the broker. peer: from the"
        " trainer and from one another, over TCP. nccl: one broadcast to all who are ready, and peer for the others.",
    )
    folder: UserPath | None = Field(
        None,
        description="Folder of versions: with file, shared by all services of this run and by no other; with peer and"
        " nccl, of the trainer alone. weights/ in the run's folder by default.",
    )
    peer: PeerConfig = Field(default_factory=PeerConfig)
    nccl: NcclConfig = Field(default_factory=NcclConfig)
    delta: Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch)] = Field(
        "auto",
        description="Publish what changed since the version before, where that is at most half of the weights. "
        "auto: with all transports but file, which is read as fast as a delta is applied.",
    )
    max_chain: int = Field(8, ge=1, description="Deltas that a late reader applies at most after a whole version.")
    keep: int = Field(3, ge=2, description="Versions kept for late readers, and the older ones that they build on.")
    probe_tokens: int = Field(32, ge=2, description="Length of the probe that every generator checks after an update.")

    @property
    def from_peers(self) -> bool:
        """Return whether the trainer and generators serve one another."""
        return self.transport in ("peer", "nccl")

    @property
    def deltas(self) -> bool:
        """Return whether versions may be published as deltas."""
        return self.delta == "on" or (self.delta == "auto" and self.transport != "file")
