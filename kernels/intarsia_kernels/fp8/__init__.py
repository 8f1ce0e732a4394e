"""Float8 weights with a scale for each tile: quantise, dequantise, and linear layers that multiply them as they are."""
