//! DeepSpeed's `scheduler` block, and the learning rate that it shares with the optimizer.
//!
//! In DeepSpeed, the scheduler sets the learning rate: `warmup_max_lr` replaces the optimizer's `lr`. Here it is the
//! same setting, `learning_rate`, so that another source can replace it in one place.

use super::PeerEntry;
use super::deepspeed::find;
use crate::raw::RawConfig;
use crate::value;
use crate::yaml::{Entry, Node, Value};

/// Turns `scheduler.params.warmup_max_lr` into `optimizer.params.lr`, which it replaces.
pub(super) fn settle_rates(raw: &mut RawConfig<'_>, spelled: &str, entries: &mut [Entry]) {
    let Some(rate) = find(entries, "scheduler.params.warmup_max_lr").cloned() else { return };
    let key_at = take(entries, "scheduler", "params", "warmup_max_lr");
    let is_auto = rate.text().is_some_and(|text| text.eq_ignore_ascii_case("auto"));
    if is_auto || rate.is_null() {
        return;
    }
    let entry = PeerEntry {
        spelled: format!("{spelled}scheduler.params.warmup_max_lr"),
        key_at: key_at.unwrap_or(rate.at),
        node: rate.clone(),
    };
    if let Some(lr) = find(entries, "optimizer.params.lr").cloned()
        && lr.float().is_some()
    {
        if value::same(&lr, &rate, false) {
            return;
        }
        take(entries, "optimizer", "params", "lr");
        let why = format!("`scheduler.params.warmup_max_lr: {}` sets the learning rate", value::brief(&rate));
        raw.no_effect(&format!("{spelled}optimizer.params.lr"), lr.at, &why);
    }
    raw.set("learning_rate", &entry, rate);
}

/// Removes the entry at `head.middle.last`, and returns its place.
fn take(entries: &mut [Entry], head: &str, middle: &str, last: &str) -> Option<crate::yaml::At> {
    let outer = entries.iter_mut().find(|entry| entry.key == head)?;
    let Value::Map(inner) = &mut outer.node.value else { return None };
    let params = inner.iter_mut().find(|entry| entry.key == middle)?;
    let Value::Map(params) = &mut params.node.value else { return None };
    let at = params.iter().position(|entry| entry.key == last)?;
    Some(params.remove(at).key_at)
}

/// `scheduler: {type, params}`, which our key of the same name reads.
pub(super) fn translate(raw: &mut RawConfig<'_>, entry: PeerEntry) {
    let Value::Map(entries) = &entry.node.value else {
        return raw.wrong_type(&entry, "a map with `type` and `params`");
    };
    let name = find(entries, "type").and_then(Node::text).map(value::fold).unwrap_or_default();
    let has = |param: &str| find(entries, &format!("params.{param}")).is_some_and(|node| !node.is_null());
    if matches!(name.as_str(), "warmupdecaylr" | "warmupcosinelr") && !has("total_num_steps") {
        let at = raw.texts.origin(entry.key_at);
        raw.notes.push(format!(
            "`{}.params.total_num_steps` is not set ({at}); it is the number of steps of the run",
            entry.spelled
        ));
    }
    let node = entry.node.clone();
    raw.set("scheduler", &entry, node);
    if let Some((_, given)) = raw.all.last_mut() {
        given.written = None;
    }
}
