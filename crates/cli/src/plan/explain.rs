//! `lockstep plan --explain-oom`: reads an out-of-memory message, and prints the changes that make the run fit.

use std::io::Read as _;

use lockstep_config::RunConfig;
use lockstep_core::{Bytes, Fault, FaultClass};
use lockstep_plan::cost::{
    Machine, OutOfMemoryReport, explain_oom, refusal_json, refusal_text, strategy_table, suggest_changes,
};
use serde_json::json;

use super::PlanSubject;
use crate::report::{self, Failure};

/// More of a message is not read.
const MAX_MESSAGE_BYTES: u64 = 1 << 20;

/// Text without an out-of-memory message.
#[derive(Debug)]
struct NoMessage;

impl std::fmt::Display for NoMessage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("standard input has no out-of-memory message with sizes")
    }
}

impl std::error::Error for NoMessage {}

impl Fault for NoMessage {
    fn class(&self) -> FaultClass {
        FaultClass::InputMissing
    }

    fn hint(&self) -> Option<String> {
        Some(
            "Paste the whole message of PyTorch (`CUDA out of memory. Tried to allocate …`) or of Lockstep (`the plan \
             needs …`), as in `lockstep plan run.yaml --explain-oom < message.txt`."
                .into(),
        )
    }
}

/// Explains the message on standard input for a run.
pub(super) fn run(config: &RunConfig, subject: &PlanSubject, as_json: bool) -> Result<(), Failure> {
    let mut bytes = Vec::new();
    // What cannot be read has no message.
    let _ = std::io::stdin().take(MAX_MESSAGE_BYTES).read_to_end(&mut bytes);
    let message = explain_oom(&String::from_utf8_lossy(&bytes));
    let message = message.ok_or_else(|| -> Failure { Box::new(NoMessage) })?;
    // A configured budget counts less than what the device has.
    let budget = message.usable().unwrap_or(subject.machine.budget);
    let text = subject.with_workload(config, |workload, machine| {
        let machine = Machine { budget, ..*machine };
        let refusal = suggest_changes(workload, &machine);
        if as_json {
            let needed = strategy_table(workload, &machine).chosen().memory.total();
            let refusal = refusal.as_ref().map(refusal_json);
            return format!(
                "{:#}\n",
                json!({ "budget_bytes": budget.0, "needed_bytes": needed.0, "refusal": refusal })
            );
        }
        match refusal {
            Some(refusal) => format!("{}\n\n{}", described(&message), refusal_text(&refusal)),
            None => {
                let needed = strategy_table(workload, &machine).chosen().memory.total();
                format!("{}\n\n{}\n", described(&message), fits(needed, budget))
            }
        }
    })?;
    report::print(&text)
}

/// What the message says, as sentences.
fn described(message: &OutOfMemoryReport) -> String {
    if let (true, Some(needed), Some(budget)) = (message.is_refusal, message.needed, message.budget) {
        return format!("Lockstep refused a plan that needs {needed}, with a budget of {budget}.");
    }
    let gpu = message.gpu.map_or_else(|| "a GPU".into(), |gpu| format!("GPU {gpu}"));
    let tried = message.tried.unwrap_or_default();
    let mut text = format!("PyTorch tried to allocate {tried} on {gpu}");
    if let Some(capacity) = message.capacity {
        text.push_str(&format!(" of {capacity}"));
    }
    let parts =
        [(message.in_use, "in use"), (message.free, "free"), (message.fragmented, "lost to fragmentation")];
    let known: Vec<String> =
        parts.into_iter().filter_map(|(bytes, what)| bytes.map(|bytes| format!("{bytes} {what}"))).collect();
    match known.is_empty() {
        true => text.push('.'),
        false => text.push_str(&format!(": {}.", known.join(", "))),
    }
    text
}

fn fits(needed: Bytes, budget: Bytes) -> String {
    format!(
        "Here the run needs {needed} and fits into {budget}: memory is planned once, and does not fragment."
    )
}
