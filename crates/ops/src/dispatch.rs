//! From run-time dtypes to compile-time types.

/// Runs the body with `$real` bound to the Rust type that stores `$dtype`.
macro_rules! with_real {
    ($dtype:expr, $real:ident => $body:expr) => {
        match $dtype {
            lockstep_core::DType::F32 => {
                type $real = f32;
                $body
            }
            lockstep_core::DType::BF16 => {
                type $real = half::bf16;
                $body
            }
            lockstep_core::DType::F16 => {
                type $real = half::f16;
                $body
            }
            other => panic!("{other} is not a float storage type"),
        }
    };
}
pub(crate) use with_real;
