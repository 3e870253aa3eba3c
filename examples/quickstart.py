"""Two answers of an SGLang server become one training step of a Hugging Face model. Needs `transformers`."""

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3Config, Qwen3ForCausalLM

import offpolicy_corr as oc
from offpolicy_corr.integrations import sglang

# what SGLang's /generate sends with return_logprob=true, top_logprobs_num=2: [log-prob, id, text]
answers = [
    {
        "output_ids": [7, 9],
        "meta_info": {
            "output_token_logprobs": [[-3.4, 7, None], [-3.6, 9, None]],
            "output_top_logprobs": [[[-3.2, 4, None], [-3.4, 7, None]], [[-3.1, 5, None], [-3.3, 8, None]]],
            "finish_reason": {"type": "stop"},
        },
    },
    {
        "output_ids": [8],
        "meta_info": {
            "output_token_logprobs": [[-3.5, 8, None]],
            "output_top_logprobs": [[[-3.2, 4, None], [-3.4, 7, None]]],
            "finish_reason": {"type": "stop"},
        },
    },
]
spec = oc.SamplerSpec(engine="sglang", logprobs="temperature", temperature=1.0, vocab_size=32)
records = sglang.read_generate(answers, spec)  # validated, or a RecordError that says what to do

prompt = torch.tensor([1, 2, 3])
sequences = [torch.cat([prompt, record.tokens]) for record in records]
input_ids = pad_sequence(sequences, batch_first=True)
attention_mask = pad_sequence([torch.ones_like(s) for s in sequences], batch_first=True)
advantages = oc.group_advantages(torch.tensor([1.0, 0.0]), prompt_ids=torch.tensor([0, 0]))

config = Qwen3Config(vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=1, head_dim=8)
model = Qwen3ForCausalLM(config)  # or from_pretrained(…)
logits = model(input_ids, attention_mask=attention_mask).logits
batch = oc.flatten_batch(logits, input_ids, records, advantages, attention_mask=attention_mask)
out = oc.policy_loss(**vars(batch), correction="sc+mis")
out.loss.backward()
print(oc.metrics.summarize(out.diagnostics, batch.record, loss_mask=batch.loss_mask))
