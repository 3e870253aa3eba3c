"""The task: a chain of modular arithmetic, worked out step by step, with a reward that a program can verify.

    prompt      <bos> 7 + 9 * 4 - 5 =            evaluated from left to right, modulo 17 here
    response    16 ; 13 ; 8 # 8 <eos>            every intermediate value, then the answer

Each number is one token. Operands and operators are drawn uniformly, so held-out problems are simply other
draws.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PAD, BOS, EOS, EQUALS, STEP, ANSWER, PLUS, MINUS, TIMES = range(9)
FIRST_NUMBER = 9
SYMBOLS = ("<pad>", "<bos>", "<eos>", "=", ";", "#", "+", "-", "*")


@dataclass(frozen=True)
class Task:
    """Chains of `operands` numbers modulo `modulus`.

    Attributes:
        modulus: numbers are 0 … modulus − 1.
        operands: numbers in a prompt; a response has one step fewer.
        mistakes: chance that a step of a *demonstration* holds a wrong, uniformly drawn number. Later steps
            go on from it. Demonstrations like these leave the model unsure, and reinforcement learning
            something to do.
    """

    modulus: int = 17
    operands: int = 4
    mistakes: float = 0.3

    @property
    def vocab_size(self) -> int:
        """Tokens in use, rounded up to a multiple of 32, so that the embedding divides into blocks."""
        return -(-(FIRST_NUMBER + self.modulus) // 32) * 32

    @property
    def prompt_length(self) -> int:
        """Tokens of every prompt: <bos>, operands, operators between them, and the equals sign."""
        return 2 * self.operands + 1

    @property
    def response_length(self) -> int:
        """Tokens of a well-formed response, <eos> included."""
        return 2 * (self.operands - 1) + 2

    def problems(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw prompts. Returns token ids [count, prompt_length]."""
        numbers = torch.randint(self.modulus, (count, self.operands), generator=generator)
        operators = torch.randint(PLUS, TIMES + 1, (count, self.operands - 1), generator=generator)
        prompts = torch.empty(count, self.prompt_length, dtype=torch.int64)
        prompts[:, 0] = BOS
        prompts[:, 1::2] = numbers + FIRST_NUMBER
        prompts[:, 2:-1:2] = operators
        prompts[:, -1] = EQUALS
        return prompts

    def solve(
        self, prompts: Tensor, wrong: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Work the prompts out.

        Args:
            prompts: token ids [N, prompt_length].
            wrong: bool [N, operands − 1], steps to get wrong; None for none.
            generator: source of the wrong numbers.

        Returns:
            The value after each step, int64 [N, operands − 1].
        """
        numbers = prompts[:, 1:-1:2] - FIRST_NUMBER
        operators = prompts[:, 2:-1:2]
        value = numbers[:, 0]
        values = []
        for step in range(self.operands - 1):
            operand, operator = numbers[:, step + 1], operators[:, step]
            result = torch.where(operator == PLUS, value + operand, value * operand)
            value = torch.where(operator == MINUS, value - operand, result) % self.modulus
            if wrong is not None:
                guess = torch.randint(self.modulus, value.shape, generator=generator)
                value = torch.where(wrong[:, step], guess, value)
            values.append(value)
        return torch.stack(values, dim=1)

    def responses(self, values: Tensor) -> Tensor:
        """Write step values [N, operands − 1] as responses, token ids [N, response_length]."""
        count, steps = values.shape
        responses = torch.empty(count, self.response_length, dtype=torch.int64)
        responses[:, 0 : 2 * steps : 2] = values + FIRST_NUMBER
        responses[:, 1 : 2 * steps : 2] = STEP
        responses[:, 2 * steps - 1] = ANSWER
        responses[:, 2 * steps] = values[:, -1] + FIRST_NUMBER
        responses[:, -1] = EOS
        return responses

    def demonstrations(self, count: int, generator: torch.Generator) -> Tensor:
        """Prompts with worked answers, mistakes included: [count, prompt_length + response_length]."""
        prompts = self.problems(count, generator)
        wrong = torch.rand(count, self.operands - 1, generator=generator) < self.mistakes
        return torch.cat([prompts, self.responses(self.solve(prompts, wrong, generator))], dim=1)

    def reward(self, prompts: Tensor, responses: Tensor) -> tuple[Tensor, Tensor]:
        """Verify responses: right means the whole format is kept and the answer is that of the prompt.

        The intermediate values are not checked, as a verifier of final answers would not check them.

        Args:
            prompts: token ids [N, prompt_length].
            responses: token ids [N, response_length], <pad> after <eos>.

        Returns:
            `(right, formatted)`: float [N] in {0, 1}, and bool [N].
        """
        is_number = (responses >= FIRST_NUMBER) & (responses < FIRST_NUMBER + self.modulus)
        pattern = self.responses(torch.zeros(1, self.operands - 1, dtype=torch.int64))[0]
        wants_number = pattern >= FIRST_NUMBER
        formatted = torch.where(wants_number, is_number, responses == pattern).all(dim=1)
        answer = self.solve(prompts)[:, -1] + FIRST_NUMBER
        return (formatted & (responses[:, -2] == answer)).float(), formatted


def show(tokens: Tensor) -> str:
    """Token ids [L] as text."""
    return " ".join(SYMBOLS[t] if t < FIRST_NUMBER else str(t - FIRST_NUMBER) for t in tokens.tolist())
