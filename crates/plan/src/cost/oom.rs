//! Reads out-of-memory messages that people paste: PyTorch's, old and new, and Lockstep's own.

use lockstep_core::Bytes;

/// What an out-of-memory message says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OutOfMemoryReport {
    /// Whether the message is Lockstep's refusal, not PyTorch's error.
    pub is_refusal: bool,
    pub gpu: Option<u32>,
    /// What PyTorch tried to allocate.
    pub tried: Option<Bytes>,
    /// The memory of the GPU.
    pub capacity: Option<Bytes>,
    pub free: Option<Bytes>,
    /// What the process had in use, or PyTorch had allocated.
    pub in_use: Option<Bytes>,
    /// What PyTorch had reserved but not used: lost to fragmentation.
    pub fragmented: Option<Bytes>,
    /// What Lockstep's plan needs.
    pub needed: Option<Bytes>,
    /// What Lockstep's plan may use.
    pub budget: Option<Bytes>,
}

impl OutOfMemoryReport {
    /// The memory that a plan may use on that device: its budget, or 97 % of its capacity.
    pub fn usable(&self) -> Option<Bytes> {
        self.budget.or_else(|| self.capacity.map(crate::cost::cluster::usable))
    }
}

/// Reads a message. `None`: the text has no out-of-memory message with a size that this function knows.
pub fn explain_oom(text: &str) -> Option<OutOfMemoryReport> {
    // Terminals wrap lines anywhere between words.
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    read_refusal(&text).or_else(|| read_pytorch(&text))
}

fn read_refusal(text: &str) -> Option<OutOfMemoryReport> {
    let start = text.find("the plan needs ")?;
    let rest = &text[start..];
    let needed = size_after(rest, "the plan needs ")?;
    let budget = size_after(rest, "over the budget of ")?;
    let report = OutOfMemoryReport { is_refusal: true, needed: Some(needed), ..Default::default() };
    Some(OutOfMemoryReport { budget: Some(budget), ..report })
}

fn read_pytorch(text: &str) -> Option<OutOfMemoryReport> {
    let start = text.find("out of memory")?;
    let text = &text[start..];
    let tried = size_after(text, "Tried to allocate ")?;
    Some(OutOfMemoryReport {
        is_refusal: false,
        gpu: number_after(text, "GPU "),
        tried: Some(tried),
        capacity: size_after(text, "total capacity of ").or_else(|| size_before(text, " total capacity")),
        free: size_before(text, " is free").or_else(|| size_before(text, " free;")),
        in_use: size_after(text, "this process has ").or_else(|| size_before(text, " already allocated")),
        fragmented: size_before(text, " is reserved by PyTorch but unallocated"),
        needed: None,
        budget: None,
    })
}

fn number_after(text: &str, words: &str) -> Option<u32> {
    let rest = &text[text.find(words)? + words.len()..];
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    rest[..end].parse().ok()
}

/// A size such as `26.01 GiB` that follows some words.
fn size_after(text: &str, words: &str) -> Option<Bytes> {
    let mut rest = text[text.find(words)? + words.len()..].split(' ');
    size(rest.next()?, rest.next()?)
}

/// A size that some words follow.
fn size_before(text: &str, words: &str) -> Option<Bytes> {
    let mut before = text[..text.find(words)?].rsplit(' ');
    let unit = before.next()?;
    size(before.next()?, unit)
}

fn size(number: &str, unit: &str) -> Option<Bytes> {
    let number: f64 = number.trim_start_matches(['(', ';']).parse().ok()?;
    let unit = unit.trim_end_matches(|c: char| !c.is_ascii_alphabetic());
    let factor = match unit.to_ascii_lowercase().as_str() {
        "b" | "byte" | "bytes" => 1.0,
        "kib" | "kb" => 1024.0,
        "mib" | "mb" => 1024f64.powi(2),
        "gib" | "gb" => 1024f64.powi(3),
        "tib" | "tb" => 1024f64.powi(4),
        _ => return None,
    };
    (number.is_finite() && number >= 0.0).then_some(Bytes((number * factor) as u64))
}
