"""Codecs, which encode values to wire bytes and back (fp32, fp16, bf16, int8 blocks), and error feedback."""
