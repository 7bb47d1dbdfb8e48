//! The textbook product with a number, in f64.

pub fn in_place(x: &[f64], factor: f64) -> Vec<f64> {
    x.iter().map(|x| x * factor).collect()
}
