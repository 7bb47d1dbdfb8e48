//! Quantised storage: 8-bit codes of optimizer states and 4-bit codes of frozen weights, as bitsandbytes defines them.

pub mod dynamic_map;
