//! What a template may make: bounds on every value, on all of them together, and on how deep they are nested.
//!
//! Templates come with models from strangers. [`lower`](super::lower) lets every value that a template makes pass
//! through the filters here. What an operation makes is counted, before it is made if it may be much larger than what
//! it is made of. So memory is at most [`MAX_TOTAL`], and a small multiple of [`MAX_VALUE`] for what an operation holds
//! meanwhile. A list counts as what it would be if it were written down, so that a list of the same list twice, and so
//! on, is not an exponential tree of a few bytes.
//!
//! Left out: time beyond the number of instructions. Each may go through a value of [`MAX_VALUE`].

use lockstep_core::Bytes;
use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, filters};

/// Largest value, in bytes of text or [`NODE_BYTES`] for each element.
pub(crate) const MAX_VALUE: usize = 32 << 20;
/// All values that one rendering makes.
pub(crate) const MAX_TOTAL: usize = 256 << 20;
/// Elements that may be gone through to measure values, in one rendering.
const MAX_VISITS: u64 = 200_000_000;
/// Lists within lists. Values are gone through by recursion.
const MAX_DEPTH: usize = 160;
/// What an element of a list takes.
const NODE_BYTES: usize = 32;
/// What a macro keeps each time that it is declared.
const MACRO_BYTES: usize = 1024;

/// Filters that [`lower`](super::lower) puts into templates. `~`, `+` and `*`:
pub(crate) const CAT: &str = "__lockstep_cat";
pub(crate) const ADD: &str = "__lockstep_add";
pub(crate) const MUL: &str = "__lockstep_mul";
/// Around what was just made.
pub(crate) const NEW: &str = "__lockstep_new";
/// Around what is gone through element by element.
pub(crate) const ITER: &str = "__lockstep_iter";
/// Where something is kept that is no value.
pub(crate) const CHARGE: &str = "__lockstep_charge";

/// What a rendering has made so far.
#[derive(Default)]
struct Spent {
    bytes: usize,
    visits: u64,
}

/// Adds the filters that bound values, and bounded versions of the engine's that make much out of little.
pub(crate) fn install(env: &mut Environment<'static>) {
    env.add_filter(NEW, |state: &mut State, value: Value| made(state, value));
    env.add_filter(CAT, |state: &mut State, a: Value, b: Value| concat(state, &a, &b));
    env.add_filter(ADD, |state: &mut State, a: Value, b: Value| add(state, &a, &b));
    env.add_filter(MUL, |state: &mut State, a: Value, b: Value| multiply(state, &a, &b));
    env.add_filter(ITER, |value: Value| check(spread(&value)).map(|()| value));
    env.add_filter(CHARGE, |state: &mut State, value: Value| charge(state, MACRO_BYTES).map(|()| value));
    // Dumps everything there is, of any size; the peers have no such function.
    env.remove_global("debug");
    macro_rules! bounded {
        ($($name:ident)*) => {$({
            const PLAIN: &str = concat!("__lockstep_plain_", stringify!($name));
            env.add_filter(PLAIN, filters::$name);
            env.add_filter(stringify!($name), |state: &mut State, mut args: Rest<Value>, kwargs: Kwargs| {
                if kwargs.args().next().is_some() {
                    args.0.push(kwargs.into());
                }
                check(foreseen(state, stringify!($name), &args)?)?;
                state.apply_filter(PLAIN, &args)
            });
        })*};
    }
    bounded! { join replace indent format batch slice split lines pprint }
    bounded! { list sort unique map select reject selectattr rejectattr reverse zip chain groupby min max sum }
}

/// Counts `bytes` that are about to be made as one value.
pub(crate) fn charge(state: &mut State, bytes: usize) -> Result<(), Error> {
    check(bytes)?;
    let spent = state.get_or_insert_extension_with(Spent::default);
    spent.bytes = spent.bytes.saturating_add(bytes);
    if spent.bytes > MAX_TOTAL {
        return Err(excess(format!("it makes more than {} in all", Bytes(MAX_TOTAL as u64))));
    }
    Ok(())
}

/// Refuses a value of so many bytes.
pub(crate) fn check(bytes: usize) -> Result<(), Error> {
    if bytes <= MAX_VALUE {
        return Ok(());
    }
    Err(excess(format!("it makes a value of more than {}", Bytes(MAX_VALUE as u64))))
}

fn excess(detail: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, detail)
}

/// Counts a value that was made, and refuses one that is too large.
fn made(state: &mut State, value: Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::String => charge(state, value.as_str().map_or(0, str::len))?,
        ValueKind::Seq | ValueKind::Iterable | ValueKind::Map => {
            let measured = measure(state, &value)?;
            charge(state, measured.items.saturating_mul(NODE_BYTES))?;
        }
        _ => {}
    }
    Ok(value)
}

/// What a value is when it is written down.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Measured {
    pub(crate) bytes: usize,
    /// Elements of the value itself.
    pub(crate) items: usize,
    /// Elements in all, and how deep they are nested.
    pub(crate) nodes: usize,
    pub(crate) depth: usize,
}

/// Measures a value, as far as the bounds allow.
pub(crate) fn measure(state: &mut State, value: &Value) -> Result<Measured, Error> {
    let mut measured = Measured::default();
    let walked = walk(value, 0, &mut measured);
    let spent = state.get_or_insert_extension_with(Spent::default);
    spent.visits += measured.nodes as u64;
    if spent.visits > MAX_VISITS {
        return Err(excess(format!("it goes through more than {MAX_VISITS} elements")));
    }
    walked.map(|()| measured)
}

fn walk(value: &Value, depth: usize, measured: &mut Measured) -> Result<(), Error> {
    measured.nodes += 1;
    measured.items += usize::from(depth == 1);
    measured.depth = measured.depth.max(depth);
    measured.bytes += NODE_BYTES;
    if depth > MAX_DEPTH {
        return Err(excess(format!("it nests values more than {MAX_DEPTH} deep")));
    }
    match value.kind() {
        ValueKind::String => measured.bytes += value.as_str().map_or(0, str::len),
        ValueKind::Seq | ValueKind::Iterable => {
            for item in value.try_iter()? {
                walk(&item, depth + 1, measured)?;
            }
        }
        ValueKind::Map => {
            for key in value.try_iter()? {
                measured.bytes += key.as_str().map_or(0, str::len);
                walk(&value.get_item(&key)?, depth + 1, measured)?;
            }
        }
        _ => {}
    }
    check(measured.bytes)
}

/// The text of a value, which `show` gives, counted.
pub(crate) fn shown(
    state: &mut State,
    value: &Value,
    show: impl FnOnce(&Value) -> String,
) -> Result<String, Error> {
    if value.as_str().is_none() {
        // Quotes and escapes make text longer.
        check(measure(state, value)?.bytes.saturating_mul(4))?;
    }
    let text = show(value);
    charge(state, text.len())?;
    Ok(text)
}

fn concat(state: &mut State, a: &Value, b: &Value) -> Result<String, Error> {
    let mut text = String::new();
    for part in [a, b] {
        match part.as_str() {
            Some(part) => {
                check(text.len() + part.len())?;
                text.push_str(part);
            }
            None => {
                let part = shown(state, part, Value::to_string)?;
                check(text.len() + part.len())?;
                text.push_str(&part);
            }
        }
    }
    charge(state, text.len())?;
    Ok(text)
}

fn add(state: &mut State, a: &Value, b: &Value) -> Result<Value, Error> {
    if let (Some(a), Some(b)) = (a.as_str(), b.as_str()) {
        charge(state, a.len() + b.len())?;
        return Ok([a, b].concat().into());
    }
    let sum = plain("a + b", a, b)?;
    made(state, sum)
}

fn multiply(state: &mut State, a: &Value, b: &Value) -> Result<Value, Error> {
    for (value, times) in [(a, b), (b, a)] {
        if matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Iterable) {
            let times = usize::try_from(times.clone()).unwrap_or(0);
            check(measure(state, value)?.bytes.saturating_sub(NODE_BYTES).saturating_mul(times))?;
        }
    }
    let product = plain("a * b", a, b)?;
    made(state, product)
}

/// What the engine itself makes of an operator.
fn plain(operator: &'static str, a: &Value, b: &Value) -> Result<Value, Error> {
    let env = Environment::empty();
    let values = Value::from_pairs([("a", a.clone()), ("b", b.clone())]);
    let result = env.compile_expression(operator).and_then(|expression| expression.eval(values));
    // Without the place, which is one in `operator`.
    result.map_err(|e| Error::new(e.kind(), e.detail().unwrap_or_default().to_string()))
}

/// Bytes of the elements that going through a value makes: a string's are its characters.
fn spread(value: &Value) -> usize {
    value.as_str().map_or(0, |text| text.chars().count().saturating_mul(NODE_BYTES))
}

/// What the engine's filter or method `name` would make of its arguments at most, the value first.
pub(crate) fn foreseen(state: &mut State, name: &str, args: &[Value]) -> Result<usize, Error> {
    let Some((subject, args)) = args.split_first() else { return Ok(0) };
    let text = subject.as_str();
    let words = strings(args);
    let longest = words.iter().map(String::len).max().unwrap_or(0);
    let largest = || numbers(args).into_iter().max().unwrap_or(0);
    Ok(match (name, text) {
        ("join", _) => {
            let measured = measure(state, subject)?;
            let items = text.map_or(measured.items, |text| text.chars().count());
            measured.bytes.saturating_add(items.saturating_mul(longest))
        }
        ("replace", Some(text)) => {
            let (old, new) = (words.first().map_or("", String::as_str), words.get(1).map_or(0, String::len));
            text.len().saturating_add(text.matches(old).count().saturating_mul(new))
        }
        ("indent", Some(text)) => {
            let lines = text.matches('\n').count() + 1;
            text.len().saturating_add(lines.saturating_mul(largest().max(longest)))
        }
        ("format", Some(text)) => formatted(state, text, args)?,
        ("split" | "rsplit", Some(text)) => {
            let pieces = match words.first() {
                Some(at) => text.matches(at.as_str()).count() + 1,
                None => text.split_whitespace().count(),
            };
            text.len().saturating_add(pieces.saturating_mul(NODE_BYTES))
        }
        ("lines" | "splitlines", Some(text)) => {
            text.len().saturating_add(text.matches(['\n', '\r']).count().saturating_mul(NODE_BYTES))
        }
        ("batch" | "slice", _) => spread(subject).saturating_add(largest().saturating_mul(NODE_BYTES)),
        ("pprint", _) => {
            let measured = measure(state, subject)?;
            let indent = measured.nodes.saturating_mul(measured.depth).saturating_mul(8);
            measured.bytes.saturating_mul(4).saturating_add(indent)
        }
        _ => spread(subject),
    })
}

/// What `format` makes: each place of the pattern may take the longest argument, and any number in it may be a width.
fn formatted(state: &mut State, pattern: &str, args: &[Value]) -> Result<usize, Error> {
    let places = pattern.matches(['%', '{']).count();
    let mut longest = 0usize;
    for arg in args {
        longest = longest.max(measure(state, arg)?.bytes);
    }
    let is_digit = |c: char| c.is_ascii_digit();
    let mut widths = pattern.split(|c| !is_digit(c)).filter(|run| !run.is_empty());
    let in_pattern = widths.try_fold(0usize, |sum, run| sum.checked_add(run.parse().ok()?));
    // A width may also be an argument: `%*d`, `{:{}}`.
    let nested =
        pattern.contains('*') || pattern.split('{').any(|part| part.contains(':') && !part.contains('}'));
    let given = if nested { numbers(args).into_iter().max().unwrap_or(0) } else { 0 };
    let widths = in_pattern.unwrap_or(usize::MAX).saturating_add(given.saturating_mul(places));
    Ok(pattern.len().saturating_add(places.saturating_mul(longest.saturating_mul(4))).saturating_add(widths))
}

/// The texts among arguments, those given by name too.
fn strings(args: &[Value]) -> Vec<String> {
    each(args).filter_map(|arg| arg.as_str().map(str::to_string)).collect()
}

/// The whole numbers among arguments, those given by name too; what is negative counts as nothing.
fn numbers(args: &[Value]) -> Vec<usize> {
    each(args).filter(|arg| arg.is_number()).map(|arg| usize::try_from(arg).unwrap_or(0)).collect()
}

fn each(args: &[Value]) -> impl Iterator<Item = Value> + '_ {
    args.iter().flat_map(|arg| match arg.kind() {
        ValueKind::Map => {
            let values = arg.try_iter().into_iter().flatten();
            values.filter_map(|key| arg.get_item(&key).ok()).collect()
        }
        _ => vec![arg.clone()],
    })
}

#[cfg(test)]
#[path = "bounds_tests.rs"]
mod tests;
