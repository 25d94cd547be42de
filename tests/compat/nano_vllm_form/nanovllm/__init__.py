"""The interface of nano-vllm (bb823b3), rebuilt for tests from its description: no line is nano-vllm's.

Names and shapes are those that kernelhub meets there: a context for each step, pages of 256 tokens, two functions of
flash-attn, and sums over ranks by a module's name `dist`. The engine around it is left out.
"""
