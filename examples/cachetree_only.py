"""The cache without SGLang: store the KV of a prompt, find it again, fetch it layer by layer."""

import os

from cachetree import EMPTY_SPAN, Cache, CacheConfig, Deadline, Family, ModelId, Plan, Span
from cachetree import page_hashes as hashes_of

family = Family(architecture="LlamaForCausalLM", num_layers=4, hidden_size=64, num_kv_heads=2,
                head_dim=16, rope="{}", tokenizer="any", model_dtype="bfloat16",
                kv_dtype="bfloat16", page_size=16)  # fmt: skip
me, pages = ModelId("my model"), hashes_of(range(1000, 1064), family.page_size)
kv = [os.urandom(len(pages) * family.kv_page_bytes) for _ in range(family.num_layers)]
with Cache(family, CacheConfig(host_bytes=1 << 20, serves=False)) as cache:
    assert cache.store(me, None, pages, [memoryview(layer) for layer in kv], e={})
    (match,) = cache.match(pages)
    plan = Plan(sender=match.model, receiver=me, location=match.location, block=EMPTY_SPAN,
                pages=Span(0, match.num_pages), num_layers=family.num_layers)  # fmt: skip
    with cache.fetch(plan, pages, Deadline.after(5)) as staging:  # None if there is no room.
        for step in plan.steps:
            staging.wait(step)
            assert b"".join(staging.views(step)) == kv[step.layer]
    print(f"{match.num_pages} pages of {match.model}: {staging.num_bytes} bytes, as stored")
