-- Become the one engine that may speak for a uid. The last fence wins; only the holder of its entry may fence.
-- KEYS log generate ; ARGV entry nonce why header ttl limit solo
if not call('XRANGE', KEYS[2], ARGV[1], ARGV[1])[1] then return {'LOST'} end
local attempt, said, fields = last(KEYS[1])
if not attempt or attempt == END then
  call('XDEL', KEYS[2], ARGV[1])
  return {attempt and 'ENDED' or 'GONE'}
end
if fields.k == 'f' and fields.e == ARGV[2] then return {'OK', attempt, said, fields.n} end   -- asked again
local before = tries(fields)
local n = (ARGV[3] == 'drain' and before > 0) and before or before + 1   -- handed over: not its fault, yet launched
if n > tonumber(ARGV[6]) then return {'POISON'} end
if n > 1 and ARGV[7] == '0' then return {'SUSPECT'} end
local new = after(attempt)
call('XADD', KEYS[1], new .. '-' .. said, 'k', 'f', 'e', ARGV[2], 'n', n, 'h', ARGV[4])
call('PEXPIRE', KEYS[1], ARGV[5])
return {'OK', new, said, n}
