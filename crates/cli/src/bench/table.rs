//! Prints measurements as a table or as JSON.

use lockstep_ops::bench::{self as ops_bench, Measurement, Roofline};
use serde_json::{Value, json};

use super::machine::{BenchTarget, failed};
use crate::gpu;
use crate::report::{self, Failure};

/// Prints a line per measurement as soon as it is known, or one JSON object at the end.
pub(super) struct Table {
    ceilings: Roofline,
    rates: Vec<Measurement>,
    json: bool,
    /// Whether the rows are operations of a training step, and show their share of it.
    of_step: bool,
}

impl Table {
    /// Measures the roofline that shares are relative to, and prints the header.
    pub(super) fn begin(target: &BenchTarget, of_step: bool) -> Result<Table, Failure> {
        let ceilings = ops_bench::roofline(&target.queue, target.dtype).map_err(failed)?;
        let table = Table { ceilings, rates: Vec::new(), json: target.json, of_step };
        if !table.json {
            let (copy, matmul) =
                (per_second(ceilings.bytes_per_second, "B"), operations(ceilings.flops_per_second));
            report::print_line(&format!(
                "{}, {}: at most {copy} (copy, read and write) and {matmul} (matmul)",
                gpu::description(&target.machine),
                target.dtype
            ));
            let step = if of_step { "   calls ms per step" } else { "" };
            report::print_line(&format!("{:<58}{:>10}{:>15}{:>9}{step}", "", "µs", "rate", "share"));
        }
        Ok(table)
    }

    pub(super) fn add(&mut self, rate: Measurement) {
        if !self.json {
            report::print_line(&self.line(&rate));
        }
        self.rates.push(rate);
    }

    fn line(&self, rate: &Measurement) -> String {
        let speed = if self.ceilings.is_memory_bound(rate) {
            per_second(rate.bytes_per_second(), "B")
        } else {
            operations(rate.flops_per_second())
        };
        let share = 100.0 * self.ceilings.share(rate);
        let step = match rate.calls_per_step {
            _ if !self.of_step => String::new(),
            0 => format!("{:>8}", "-"),
            times => format!("{times:>8}{:>12.3}", 1e3 * rate.seconds_per_step()),
        };
        format!("{:<58}{:>10.1}{speed:>15}{share:>7.0} %{step}", rate.name, 1e6 * rate.seconds)
    }

    /// The time of a step as the sum of its operations.
    fn step_seconds(&self) -> f64 {
        self.rates.iter().map(Measurement::seconds_per_step).sum()
    }

    /// Prints the sum over a step of `tokens` tokens.
    pub(super) fn end(self, target: &BenchTarget, mut about: Value, tokens: usize) -> Result<(), Failure> {
        let seconds = self.step_seconds();
        if self.json {
            let object = about.as_object_mut().expect("a description is an object");
            object.extend([
                ("program".into(), json!("lockstep")),
                ("version".into(), json!(env!("CARGO_PKG_VERSION"))),
                ("device".into(), json!(gpu::description(&target.machine))),
                ("dtype".into(), json!(target.dtype.to_string())),
                ("copy_bytes_per_second".into(), json!(self.ceilings.bytes_per_second)),
                ("product_flops_per_second".into(), json!(self.ceilings.flops_per_second)),
                ("rates".into(), self.rates.iter().map(|rate| self.as_json(rate)).collect()),
            ]);
            if self.of_step {
                object.insert("step_seconds".into(), json!(seconds));
            }
            return report::print(&format!("{about}\n"));
        }
        if self.of_step {
            report::print_line(&format!(
                "{:.1} ms per step in total, {:.0} tokens/s",
                1e3 * seconds,
                tokens as f64 / seconds
            ));
        }
        Ok(())
    }

    fn as_json(&self, rate: &Measurement) -> Value {
        json!({
            "name": rate.name, "times": rate.calls_per_step, "seconds": rate.seconds, "fastest": rate.spread[0],
            "slowest": rate.spread[1], "bytes": rate.bytes, "flops": rate.flops, "share": self.ceilings.share(rate),
        })
    }
}

fn operations(flops: f64) -> String {
    per_second(flops, "FLOP")
}

/// Three digits and a unit: `812 GB/s`, `1.20 TFLOP/s`.
pub(crate) fn per_second(amount: f64, of: &str) -> String {
    let (value, unit) = match amount {
        a if a >= 1e12 => (a / 1e12, "T"),
        a if a >= 1e9 => (a / 1e9, "G"),
        a => (a / 1e6, "M"),
    };
    let digits = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
    format!("{value:.digits$} {unit}{of}/s")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_have_three_digits() {
        let shown = [1.234e12, 812.4e9, 45.67e9, 3.2e6].map(|amount| per_second(amount, "B"));
        assert_eq!(shown, ["1.23 TB/s", "812 GB/s", "45.7 GB/s", "3.20 MB/s"]);
    }
}
