-- Come back to a stream: its record and the ms to its deadline (-1 none), if the key is that of its opener and all of
-- its logs are there. The lapse is put off while any of them is open.
-- KEYS stream streams ; ARGV member key_hash reply_prefix
local uids, key, life, deadline, record = unpack(call('HMGET', KEYS[1], 'u', 'k', 'l', 'd', 'm'))
if not record or key ~= ARGV[2] then return nil end
local open, now = false, clock()
for uid in string.gmatch(uids, '%S+') do
  local attempt = last(ARGV[3] .. uid)
  if not attempt then return nil end
  open = open or attempt ~= END
end
if open then put_off(KEYS[1], KEYS[2], ARGV[1], tonumber(life), deadline, now) end
return {record, deadline == '' and -1 or math.max(0, deadline - now)}
