"""How new weights reach the generators: the transports and their settings."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from schemas.config.base import Seconds, Section, UserPath


def _switch(value: Any) -> Any:
    """Return on or off, which YAML reads as true or false if they are not quoted."""
    return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


class PeerConfig(Section):
    """The transport peer: the trainer serves weights, and each generator serves what it has fetched."""

    host: str | None = Field(None, min_length=1)
    """Address at which other machines reach this one; by default the address from which it reaches the broker. If the
    broker runs on this machine, that is 127.0.0.1: set host if generators run elsewhere."""
    port: int = Field(0, ge=0, le=65535)
    """Port to serve weights at; 0 picks a free one. Several services on one machine need 0."""
    uplinks: int = Field(2, ge=1)
    """To how many generators the trainer sends each part of a version while others want it too. These pass it on."""
    streams: int = Field(4, ge=1, le=32)
    """Connections over which a generator fetches at once."""


class NcclConfig(Section):
    """The transport nccl: broadcasts of new weights; a generator that misses one fetches from peers."""

    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Backend of broadcasts: nccl between GPUs, gloo between CPUs. auto: the one that the trainer's machine has; a
    generator without it fetches from peers."""
    roll_s: Seconds = 1.0
    """How long a version waits for generators to join its broadcast. It is shorter if all of the last broadcast have
    answered."""
    silence_s: float = Field(5.0, ge=1.0, allow_inf_nan=False)
    """How long a broadcast may make no progress before it is aborted."""


class PublishConfig(Section):
    """Publication of new weights to the generators."""

    transport: Literal["file", "redis", "peer", "nccl"] = "file"
    """file: safetensors in a folder that all services can read. redis: chunks in the broker. peer: over TCP, from the
    trainer and from other generators. nccl: one broadcast to all generators that are ready, and peer for the others."""
    folder: UserPath | None = None
    """Folder of versions. With file, all services of this run share it, and no other run may use it; with peer and
    nccl, only the trainer uses it. By default weights/ in the run's folder."""
    peer: PeerConfig = Field(default_factory=PeerConfig)
    nccl: NcclConfig = Field(default_factory=NcclConfig)
    delta: Annotated[
        Literal["auto", "on", "off"],
        BeforeValidator(_switch, json_schema_input_type=Literal["auto", "on", "off"] | bool),
    ] = "auto"
    """Publish only what changed since the last version, if that is at most half of the weights. auto: with all
    transports except file, which is read as fast as a delta is applied."""
    max_chain: int = Field(8, ge=1)
    """Most deltas that a late reader applies after a whole version."""
    keep: int = Field(3, ge=2)
    """Versions kept for late readers, in addition to the older ones that these build on."""
    probe_tokens: int = Field(256, ge=2)
    """Length of the probe that every generator checks after an update."""

    @property
    def from_peers(self) -> bool:
        """Return whether the trainer and generators serve one another."""
        return self.transport in ("peer", "nccl")

    @property
    def deltas(self) -> bool:
        """Return whether versions may be published as deltas."""
        return self.delta == "on" or (self.delta == "auto" and self.transport != "file")
