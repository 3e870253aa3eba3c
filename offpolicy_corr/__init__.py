"""Off-policy corrections for reinforcement learning of LLMs on mixed sampler fleets.

Data flows one way: record → trainer log-probs → weights → centering → loss → metrics. Start at `policy_loss`.
"""

from . import guards, metrics
from .assembly import Turn, assemble, pack
from .candidates import CandidateSet
from .correction import Correction
from .errors import RecordError
from .logprobs import selected_logprobs
from .loss import policy_loss, policy_loss_from_hidden, policy_loss_from_logprobs
from .missing import missing_tokens
from .record import SamplerRecord
from .reduction import global_denominator
from .requests import request_parameters
from .result import PolicyLoss, TokenDiagnostics
from .spec import SamplerSpec
from .statistics import RecordWarning
from .weights import ClampedIS, FullIS, MaskedIS, PPOClip, TruncatedIS, Unweighted, WeightRule

__version__ = "0.1.0"

__all__ = [
    "CandidateSet",
    "ClampedIS",
    "Correction",
    "FullIS",
    "MaskedIS",
    "PPOClip",
    "PolicyLoss",
    "RecordError",
    "RecordWarning",
    "SamplerRecord",
    "SamplerSpec",
    "TokenDiagnostics",
    "TruncatedIS",
    "Turn",
    "Unweighted",
    "WeightRule",
    "assemble",
    "global_denominator",
    "guards",
    "metrics",
    "missing_tokens",
    "pack",
    "policy_loss",
    "policy_loss_from_hidden",
    "policy_loss_from_logprobs",
    "request_parameters",
    "selected_logprobs",
]
