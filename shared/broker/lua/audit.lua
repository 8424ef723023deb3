-- Say that these requests are held: the last id of each log, whose life is lengthened unless it has ended.
-- KEYS log.. ; ARGV held_ttl
local out = {}
for i, log in ipairs(KEYS) do
  local attempt, _, _, id = last(log)
  out[i] = id or ''
  if attempt and attempt ~= END then call('PEXPIRE', log, ARGV[1]) end
end
return out
