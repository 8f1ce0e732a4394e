"""SwiGLU that keeps only its inputs for backward, as an opaque operator."""
