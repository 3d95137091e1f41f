"""Every name that leaves this project as telemetry: attributes, metrics, units, buckets.

OpenTelemetry's GenAI and RPC conventions where they have a name, `baton.*` where they have none. They
still move, so nobody else spells a name out. Must not know: who records what, and when.
"""

# --- GenAI: https://opentelemetry.io/docs/specs/semconv/gen-ai/
GEN_AI_OPERATION_NAME = "gen_ai.operation.name"
GEN_AI_PROVIDER_NAME = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL = "gen_ai.request.model"
GEN_AI_REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_TEMPERATURE = "gen_ai.request.temperature"
GEN_AI_REQUEST_TOP_P = "gen_ai.request.top_p"
GEN_AI_REQUEST_TOP_K = "gen_ai.request.top_k"
GEN_AI_REQUEST_CHOICE_COUNT = "gen_ai.request.choice.count"
GEN_AI_RESPONSE_ID = "gen_ai.response.id"
GEN_AI_RESPONSE_MODEL = "gen_ai.response.model"
GEN_AI_RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
GEN_AI_USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS = "gen_ai.usage.cache_read.input_tokens"
GEN_AI_TOKEN_TYPE = "gen_ai.token.type"

OPERATION_CHAT = "chat"
PROVIDER_BATON = "baton"
TOKEN_TYPE_INPUT = "input"
TOKEN_TYPE_OUTPUT = "output"

GEN_AI_SERVER_TIME_TO_FIRST_TOKEN = "gen_ai.server.time_to_first_token"
GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN = "gen_ai.server.time_per_output_token"
GEN_AI_SERVER_REQUEST_DURATION = "gen_ai.server.request.duration"

# The boundaries the conventions prescribe for these three, in seconds.
TIME_TO_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08),
    *(0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
TIME_PER_OUTPUT_TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
REQUEST_DURATION_BUCKETS = (
    *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64),
    *(1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
)

# --- RPC, HTTP, errors: https://opentelemetry.io/docs/specs/semconv/rpc/, .../http/
RPC_SYSTEM = "rpc.system"
RPC_SERVICE = "rpc.service"
RPC_METHOD = "rpc.method"
RPC_GRPC_STATUS_CODE = "rpc.grpc.status_code"
RPC_SYSTEM_GRPC = "grpc"
ERROR_TYPE = "error.type"
HTTP_REQUEST_METHOD = "http.request.method"
HTTP_ROUTE = "http.route"
HTTP_RESPONSE_STATUS_CODE = "http.response.status_code"

# --- The project's own attributes
BATON_REPLY_ID = "baton.reply.id"
BATON_REPLY_EPOCH = "baton.reply.epoch"
BATON_LINK_REASON = "baton.link.reason"  # why a span continues another
BATON_PREFILL_TARGET = "baton.prefill.target"
BATON_PREFILL_ATTEMPTS = "baton.prefill.attempts"
BATON_KV_BYTES = "baton.kv.bytes"
BATON_KV_PAGES = "baton.kv.pages"
BATON_KV_SHARED_PAGES = "baton.kv.shared_pages"
BATON_KV_DATA_PAGES = "baton.kv.data_pages"
BATON_GENERATED_TOKENS = "baton.generated_tokens"
BATON_TTFT_MS = "baton.ttft_ms"  # for tail sampling: a stream's duration says nothing (field note 41)
BATON_STAGE = "baton.stage"
BATON_OUTCOME = "baton.outcome"
BATON_FINISH_REASON = "baton.finish_reason"
BATON_REASON = "baton.reason"
BATON_ROLE = "baton.role"
BATON_STATE = "baton.state"
BATON_BREAKER = "baton.breaker"

# --- The project's own metrics
TTFT_STAGE_DURATION = "baton.ttft.stage.duration"
INTER_TOKEN_LATENCY = "baton.inter_token_latency"
HANDOFF_DURATION = "baton.handoff.duration"
HANDOFF_STAGE_DURATION = "baton.handoff.stage.duration"
PREFILL_ATTEMPTS = "baton.prefill.attempts"
KV_TRANSFER_BYTES = "baton.kv.transfer.size"
KV_TRANSFER_DURATION = "baton.kv.transfer.duration"
TOKENS = "baton.tokens"
LOG_APPEND_DURATION = "baton.log.append.duration"
LOG_APPENDED_EVENTS = "baton.log.events"
RETRIES = "baton.retries"
RESUMES = "baton.resumes"
SLOW_CLIENTS = "baton.slow_clients"
STREAMS = "baton.streams"
ROUTING_PICKS = "baton.routing.picks"
ROUTING_WORKERS = "baton.routing.workers"
ENGINE_RUNNING = "baton.engine.running"
ENGINE_WAITING = "baton.engine.waiting"
ENGINE_BLOCKS_USED = "baton.engine.blocks.used"
ENGINE_BLOCKS_CACHED = "baton.engine.blocks.cached"
ENGINE_BLOCKS_TOTAL = "baton.engine.blocks.limit"
ENGINE_PROMPT_TOKENS_COMPUTED = "baton.engine.prompt_tokens.computed"
ENGINE_TOKENS_RECOMPUTED = "baton.engine.tokens.recomputed"

# Stages run from fractions of a millisecond (flush) to seconds (queues, prefill).
STAGE_BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
# The conventions' boundaries start at 10 ms; a small model's gaps lie below, stalls far above.
INTER_TOKEN_LATENCY_BUCKETS = (0.001, 0.0025, 0.005, *TIME_PER_OUTPUT_TOKEN_BUCKETS, 5.0, 10.0)

SECONDS = "s"
BYTES = "By"


def ttft_stage_attribute(stage: str) -> str:
    """The span attribute of one stage of the time to first token, in milliseconds."""
    return f"baton.ttft.{stage}_ms"
