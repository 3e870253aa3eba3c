"""Off-policy corrections for reinforcement learning of LLMs on mixed sampler fleets.

Data flows one way: record → trainer log-probs → weights → centering → loss → metrics. Start at `policy_loss`.
"""

from . import guards, metrics
from .batch import FlatBatch, flatten_batch, group_advantages
from .correction import Correction
from .importance import importance_weights
from .logprobs import selected_logprobs
from .loss import policy_loss, policy_loss_from_hidden, policy_loss_from_logprobs
from .per_token_loss import TokenLosses, token_losses
from .records.assembly import assemble, pack
from .records.candidates import CandidateSet
from .records.errors import RecordError, RecordWarning
from .records.record import SamplerRecord, missing_tokens
from .records.requests import request_parameters
from .records.sampler_spec import SamplerSpec
from .records.storage import load_records, save_records
from .records.trajectory import Batch, Trajectory, Turn
from .records.weight_versions import fresh_tokens
from .reduction import global_denominator
from .result import PolicyLoss, TokenDiagnostics
from .weights import ClampedIS, FullIS, MaskedIS, PPOClip, TruncatedIS, Unweighted, WeightRule

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "CandidateSet",
    "ClampedIS",
    "Correction",
    "FlatBatch",
    "FullIS",
    "MaskedIS",
    "PPOClip",
    "PolicyLoss",
    "RecordError",
    "RecordWarning",
    "SamplerRecord",
    "SamplerSpec",
    "TokenDiagnostics",
    "TokenLosses",
    "Trajectory",
    "TruncatedIS",
    "Turn",
    "Unweighted",
    "WeightRule",
    "assemble",
    "flatten_batch",
    "fresh_tokens",
    "global_denominator",
    "group_advantages",
    "guards",
    "importance_weights",
    "load_records",
    "metrics",
    "missing_tokens",
    "pack",
    "policy_loss",
    "policy_loss_from_hidden",
    "policy_loss_from_logprobs",
    "request_parameters",
    "save_records",
    "selected_logprobs",
    "token_losses",
]
