"""KV caches allocated from the mask: one rule decides what is attended, so it also decides what must be kept.

`plan` finds until when each key is seen and how many slots that takes, `init` makes a `Cache` of them, and
`Cache.append` gives a `View` of what the new tokens may see. `lifetimes` asks the mask, `slots` allocates, `store`
holds, `files` saves.
"""

from longspan.cache.files import restore as restore
from longspan.cache.plan import Plan as Plan
from longspan.cache.plan import plan as plan
from longspan.cache.store import Cache as Cache
from longspan.cache.store import View as View
from longspan.cache.store import init as init
