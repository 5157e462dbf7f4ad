"""Ways to compute attention. All have one contract: `unsupported(request)`, `tiles(request)` and `run(...)`.

`unsupported` gives the reason why a request cannot run here, or None. `tiles` gives the query and key tile sizes the
engine plans with. `run(q, k, v, layout, ...)` returns (out, lse). Engines never import each other.
"""
