"""Chat templates that the training library knows, by fingerprint. A contract test compares."""

import hashlib

# Their tool calls can be parsed without the job saying how.
PARSED = {
    "33204f1acb5bd000": "gemma4",
    "55572b8d3c834204": "gemma4_v2",
    "781d10940fbc44be": "gemma4_v3",
    "2f1b4d75d067bae3": "gemma4_v4",
    "0a2c8073c878ab1d": "gemma4_v5",
    "44f815868bf02fa4": "glm4moe",
    "a4c9919cbbd4acdd": "gptoss",
    "6d65c8804847ad74": "lfm2_2_5",
    "c5b67247c9f736f6": "lfm2_2_5_v2",
    "86f4770449a4797c": "lfm2_2_5_vl",
    "5504d163d879bfb6": "lfm2_v2",
    "e10ca381b1ccc5cf": "llama3_1",
    "5816fce10444e03c": "llama3_2",
    "58933db77d3099b4": "nemotron_3_5_lightning",
    "ab7813c3abdd9cb6": "nemotron_3_nano",
    "575fb74f54ed264d": "nemotron_3_super",
    "82753bef5cedc493": "nemotron_3_ultra",
    "cd8e9439f0570856": "qwen2_5",
    "a55ee1b1660128b7": "qwen3",
    "273d8e0e683b8850": "qwen3_5_nothink",
    "a4aee8afcf2e0711": "qwen3_5_think",
    "e84f32a23fdda276": "qwen3_6",
    "c3cf9e34abf4f9e3": "qwen3_8",
    "64f85b198065d0fb": "qwen3_instruct_2507",
    "3636d0f0bd6bef02": "qwen3_vl",
}
# They rewrite earlier turns; training puts a twin that does not in their place.
REPLACED = {"a55ee1b1660128b7"}


def template_fingerprint(template: str) -> str:
    """The first 16 hexadecimal digits of its SHA-256."""
    return hashlib.sha256(template.encode()).hexdigest()[:16]
