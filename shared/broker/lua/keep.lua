-- Remember a stream that can be resumed, or say that somebody reads it. UNKNOWN: it is not there, and no record given.
-- KEYS stream streams ; ARGV member life cap|'' uids key_hash timeout|'' record|''
local now, life = clock(), tonumber(ARGV[2])
if call('EXISTS', KEYS[1]) == 0 then
  if ARGV[7] == '' then return 'UNKNOWN' end
  if ARGV[3] ~= '' and call('ZCARD', KEYS[2]) >= tonumber(ARGV[3]) then return 'FULL' end
  local deadline = ARGV[6] == '' and '' or string.format('%.0f', now + ARGV[6])
  call('HSET', KEYS[1], 'u', ARGV[4], 'k', ARGV[5], 'l', ARGV[2], 'd', deadline, 'm', ARGV[7])
end
put_off(KEYS[1], KEYS[2], ARGV[1], life, call('HGET', KEYS[1], 'd'), now)
return 'OK'
