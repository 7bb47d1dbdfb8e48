//! The definitions, in f64, from the row of each position alone. `padding` positions at the end have no part.

/// The first position of every row.
fn firsts(source: &[u32], rows: usize, padding: usize) -> Vec<Option<usize>> {
    let counted = &source[..source.len() - padding];
    (0..rows).map(|m| counted.iter().position(|row| *row as usize == m)).collect()
}

pub fn expand_first(x: &[f64], cols: usize, source: &[u32], padding: usize) -> Vec<f64> {
    let mut y = vec![0.0; source.len() * cols];
    for (m, n) in firsts(source, x.len() / cols, padding).into_iter().enumerate() {
        if let Some(n) = n {
            y[n * cols..][..cols].copy_from_slice(&x[m * cols..][..cols]);
        }
    }
    y
}

pub fn first(x: &[f64], cols: usize, source: &[u32], rows: usize, padding: usize) -> Vec<f64> {
    let row = |n: Option<usize>| n.map_or(vec![0.0; cols], |n| x[n * cols..][..cols].to_vec());
    firsts(source, rows, padding).into_iter().flat_map(row).collect()
}

pub fn sum(x: &[f64], cols: usize, source: &[u32], rows: usize, padding: usize) -> Vec<f64> {
    let mut y = vec![0.0; rows * cols];
    for (n, m) in source[..source.len() - padding].iter().enumerate() {
        for c in 0..cols {
            y[*m as usize * cols + c] += x[n * cols + c];
        }
    }
    y
}

/// Offsets and entries of a map.
pub fn positions_of_rows(source: &[u32], rows: usize, padding: usize) -> (Vec<u32>, Vec<u32>) {
    let counted = &source[..source.len() - padding];
    let of_row = |m: usize| (0..counted.len() as u32).filter(move |n| counted[*n as usize] as usize == m);
    let (mut offsets, mut entries) = (vec![0], Vec::new());
    for m in 0..rows {
        entries.extend(of_row(m));
        offsets.push(entries.len() as u32);
    }
    (offsets, entries)
}
