"""The scripts of the Redis event log: each is one atomic decision, judged by Redis' own clock.

Keys of a reply, all in one cluster slot: `:events` (stream, IDs `<seq>-0`), `:meta` (hash), `:watch`
(hash: gateway to expiry of its attachment mark, in ms), `:gone` (tombstone). Scripts that work on many
replies take each reply's keys as one group and treat each group alone, behind a pcall.
With Redis Cluster a call may touch one slot only: call once per group (or slot) there; only
`RedisEventLog.append`, `renew` and `attach` pass more than one group.
"""

import hashlib
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua source and the SHA-1 that EVALSHA knows it by."""

    source: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha", hashlib.sha1(self.source.encode()).hexdigest())


def events_key(reply_id: str) -> str:
    return f"baton:{{{reply_id}}}:events"


def meta_key(reply_id: str) -> str:
    return f"baton:{{{reply_id}}}:meta"


def watch_key(reply_id: str) -> str:
    return f"baton:{{{reply_id}}}:watch"


def gone_key(reply_id: str) -> str:
    return f"baton:{{{reply_id}}}:gone"


_NOW = """
local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end
"""

# KEYS: meta, gone. ARGV: schema, doc, gateway, lease token, safety TTL ms. 1 created, 0 exists.
CREATE = Script("""
if redis.call('EXISTS', KEYS[1], KEYS[2]) > 0 then return 0 end
redis.call('HSET', KEYS[1], 'schema', ARGV[1], 'doc', ARGV[2], 'status', 'queued', 'epoch', 1,
  'last_seq', 0, 'owner', ARGV[3], 'lease', ARGV[4])
redis.call('PEXPIRE', KEYS[1], ARGV[5])
return 1
""")

# KEYS: events, meta, gone. ARGV: schema, doc, gateway, lease token, safety TTL ms, epoch.
# 1 appendable (an intact log stays as it is), 0 fenced.
RESTORE = Script("""
local m = redis.pcall('HMGET', KEYS[2], 'epoch', 'last_seq')
if not m.err and m[1] then
  if tonumber(m[1]) > tonumber(ARGV[6]) then return 0 end
  local len = redis.pcall('XLEN', KEYS[1])
  if type(len) == 'number' and len == tonumber(m[2]) then return 1 end
elseif redis.call('EXISTS', KEYS[3]) == 1 then
  return 0
end
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('HSET', KEYS[2], 'schema', ARGV[1], 'doc', ARGV[2], 'status', 'queued', 'epoch', ARGV[6],
  'last_seq', 0, 'owner', ARGV[3], 'lease', ARGV[4])
redis.call('PEXPIRE', KEYS[2], ARGV[5])
return 1
""")

# KEYS per reply: meta (its other keys, in the same slot, are derived: packing arguments is what an
# append costs its client). ARGV: gateway, reply TTL ms, tombstone ms, safety TTL ms, and one JSON array,
# per reply [epoch, status, events], per event [seq, epoch, kind, is terminal, payload as JSON text].
# Answer per reply: outcomes as letters (A appended, D duplicate, G gap, F fenced), the next seq the
# log takes, and the other gateways with a live mark.
# XADD into an empty stream takes any ID, so lost data is recognised here: the stream must be exactly
# as long as meta says. A key of another type, or a stream that refuses the ID, counts as lost data too;
# a store that takes no writes fails the call.
APPEND = Script(
    _NOW
    + """
local function full(reason)
  local code = string.match(reason, '^%u+')
  return code == 'OOM' or code == 'READONLY' or code == 'MISCONF' or code == 'NOREPLICAS'
end

local function append(meta_key, epoch, status, events)
  local base = string.sub(meta_key, 1, -5)
  local events_key, gone_key = base .. 'events', base .. 'gone'
  local m = redis.call('HMGET', meta_key, 'epoch', 'last_seq', 'terminal_seq')
  if not m[1] then
    local code = redis.call('EXISTS', gone_key) == 1 and 'F' or 'G'
    return {string.rep(code, #events), 1}
  end
  local stored, last, terminal = tonumber(m[1]), tonumber(m[2]), m[3]
  if epoch < stored then return {string.rep('F', #events), last + 1} end
  if redis.call('XLEN', events_key) ~= last then return {string.rep('G', #events), 1} end
  if epoch > stored then redis.call('HSET', meta_key, 'epoch', epoch, 'owner', ARGV[1]) end
  local codes, before = {}, last
  for i, event in ipairs(events) do
    local seq, id, code = event[1], event[1] .. '-0', nil
    if seq < 1 then
      code = 'F'
    elseif seq <= last then
      local held = redis.call('XRANGE', events_key, id, id)[1]
      code = held and tonumber(held[2][4]) == event[2] and 'D' or 'F'
    elseif terminal then
      code = 'F'
    elseif seq > last + 1 then
      code = 'G'
    else
      redis.call('XADD', events_key, id, 'kind', event[3], 'epoch', event[2], 'payload', event[5])
      code, last = 'A', seq
      if event[4] then terminal = seq end
    end
    codes[i] = code
  end
  local answer = {table.concat(codes), last + 1}
  if last == before then return answer end
  redis.call('HSET', meta_key, 'last_seq', last, 'status', status)
  if before == 0 then redis.call('PEXPIRE', events_key, ARGV[4]) end
  if terminal then
    redis.call('HSET', meta_key, 'terminal_seq', terminal)
    redis.call('PEXPIRE', events_key, ARGV[2])
    redis.call('PEXPIRE', meta_key, ARGV[2])
    redis.call('SET', gone_key, '1', 'PX', ARGV[3])
  end
  local marks = redis.pcall('HGETALL', base .. 'watch')
  if #marks > 0 then
    local now = now_ms()
    for i = 1, #marks, 2 do
      if marks[i] ~= ARGV[1] and tonumber(marks[i + 1]) > now then answer[#answer + 1] = marks[i] end
    end
  end
  return answer
end

local answers = {}
for k, pending in ipairs(cjson.decode(ARGV[5])) do
  local ok, answer = pcall(append, KEYS[k], pending[1], pending[2], pending[3])
  if not ok then
    local reason = type(answer) == 'table' and answer.err or tostring(answer)
    if full(reason) then return redis.error_reply(reason) end
    answer = {string.rep('G', #pending[3]), 1}
  end
  answers[k] = answer
end
return answers
"""
)

# KEYS: meta, events, gone. ARGV: lease token seen, new token, gateway, schema, safety TTL ms.
# The new epoch; 0 lost; -1 unknown, also when events are missing (nobody could continue it); -2 gone.
CLAIM = Script("""
local m = redis.call('HMGET', KEYS[1], 'lease', 'terminal_seq', 'schema', 'last_seq')
if not m[1] then return redis.call('EXISTS', KEYS[3]) == 1 and -2 or -1 end
if m[1] ~= ARGV[1] or m[2] or tonumber(m[3]) > tonumber(ARGV[4]) then return 0 end
if redis.call('XLEN', KEYS[2]) ~= tonumber(m[4]) then return -1 end
redis.call('HSET', KEYS[1], 'lease', ARGV[2], 'owner', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[5])
redis.call('PEXPIRE', KEYS[2], ARGV[5])
return redis.call('HINCRBY', KEYS[1], 'epoch', 1)
""")

# KEYS per reply: events, meta. ARGV: new lease token, safety TTL ms, then each reply's epoch.
# Answer per reply: 0 fenced or missing, 1 renewed, 2 renewed and a cancel is asked for.
RENEW = Script("""
local function renew(k, epoch)
  local m = redis.call('HMGET', KEYS[k + 1], 'epoch', 'terminal_seq', 'cancel')
  if m[1] ~= epoch then return 0 end
  if m[2] then return 1 end
  redis.call('HSET', KEYS[k + 1], 'lease', ARGV[1])
  redis.call('PEXPIRE', KEYS[k], ARGV[2])
  redis.call('PEXPIRE', KEYS[k + 1], ARGV[2])
  return m[3] and 2 or 1
end
local answers = {}
for k = 1, #KEYS, 2 do
  local ok, answer = pcall(renew, k, ARGV[2 + (k + 1) / 2])
  answers[#answers + 1] = ok and answer or 0
end
return answers
""")

# KEYS per reply: meta, watch. ARGV: gateway, mark ms. The watch key lives as long as its last mark.
ATTACH = Script(
    _NOW
    + """
local expiry = now_ms() + tonumber(ARGV[2])
for k = 1, #KEYS, 2 do
  if redis.call('EXISTS', KEYS[k]) == 1 then
    redis.pcall('HSET', KEYS[k + 1], ARGV[1], expiry)
    redis.pcall('PEXPIRE', KEYS[k + 1], ARGV[2])
  end
end
return 1
"""
)

# KEYS: watch. 1 if any gateway's mark is live.
IS_ATTACHED = Script(
    _NOW
    + """
local marks, now = redis.pcall('HVALS', KEYS[1]), now_ms()
for i = 1, #marks do
  if tonumber(marks[i]) > now then return 1 end
end
return 0
"""
)

# KEYS: meta, gone. The owner's gateway, '' if the reply has ended; -1 unknown; -2 gone.
CANCEL = Script("""
local m = redis.call('HMGET', KEYS[1], 'owner', 'terminal_seq')
if not m[1] then return redis.call('EXISTS', KEYS[2]) == 1 and -2 or -1 end
if m[2] then return '' end
redis.call('HSET', KEYS[1], 'cancel', '1')
return m[1]
""")
