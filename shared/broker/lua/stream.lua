-- A stream that can be resumed: a hash with u uids, k key hash, l life, d deadline ('' none), m record; and a place
-- in the set of all streams that are not over, by the time at which it lapses unless somebody reads it before.
local function clock() local t = call('TIME'); return t[1] * 1000 + math.floor(t[2] / 1000) end
-- Put off the lapse, but never beyond the deadline. The hash outlives the lapse, which is what ends the stream.
local function put_off(stream, streams, member, life, deadline, now)
  local due, ttl = now + life, 2 * life + 60000
  if deadline ~= '' then due = math.min(due, tonumber(deadline)) end
  call('PEXPIRE', stream, ttl)
  call('ZADD', streams, due, member)
  call('PEXPIRE', streams, math.max(ttl, call('PTTL', streams)))
end
