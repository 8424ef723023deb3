-- Look at logs that are silent: per log its last id, and whether an engine has audited it since the last sweep
-- (its life is then longer than a log has by itself; it is set back, so that only a new audit is seen). Logs that
-- several look at are not set back: they count as held until that life has worn off.
-- KEYS log.. ; ARGV ttl several
local out = {}
for i, log in ipairs(KEYS) do
  local attempt, _, _, id = last(log)
  local held = 0
  if attempt and attempt ~= END and call('PTTL', log) > tonumber(ARGV[1]) then
    held = 1
    if ARGV[2] == '0' then call('PEXPIRE', log, ARGV[1]) end
  end
  out[2 * i - 1], out[2 * i] = id or '', held
end
return out
