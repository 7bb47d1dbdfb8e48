//! Parsers of flag values. An error completes clap's "invalid value '...' for '--flag': ".

pub(super) fn nnodes(text: &str) -> Result<u16, String> {
    if text.contains(':') {
        return Err("a range (min:max) is not implemented yet; give one number".into());
    }
    text.parse().ok().filter(|n| *n > 0).ok_or_else(|| "expected a number from 1 to 65535".into())
}

/// torchrun's kinds of rendezvous. Others need a service of their own.
pub(super) fn rendezvous(text: &str) -> Result<String, String> {
    match text {
        "static" | "c10d" => Ok(text.to_owned()),
        _ => Err("only static and c10d work: nodes find each other at node 0's address".into()),
    }
}

/// A host and, unless it is left to the default, a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Endpoint {
    pub(crate) host: String,
    pub(crate) port: Option<u16>,
}

impl std::str::FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Endpoint, String> {
        let wrong = || "expected HOST:PORT".to_owned();
        let (host, port) = match text.strip_prefix('[') {
            Some(address) => {
                let (host, rest) = address.split_once(']').ok_or_else(wrong)?;
                (host, if rest.is_empty() { None } else { Some(rest.strip_prefix(':').ok_or_else(wrong)?) })
            }
            None => text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port))),
        };
        let port = port.map(|port| port.parse().map_err(|_| wrong())).transpose()?;
        // torchrun takes any free port for 0, which other nodes cannot know.
        match host.is_empty() {
            true => Err(wrong()),
            false => Ok(Endpoint { host: host.to_owned(), port: port.filter(|port| *port != 0) }),
        }
    }
}

pub(crate) fn tee(text: &str) -> Result<u8, String> {
    match text.parse() {
        Ok(bits @ 0..=3) => Ok(bits),
        _ if text.contains(':') => Err("a map of ranks is not implemented yet; give 0, 1, 2 or 3".into()),
        _ => Err("expected 0 (none), 1 (stdout), 2 (stderr) or 3 (both)".into()),
    }
}

pub(super) fn slots(text: &str) -> Result<usize, String> {
    up_to(4096, text)
}

/// A dimension of a tensor, small enough that the product of all dimensions does not overflow.
pub(super) fn dimension(text: &str) -> Result<usize, String> {
    up_to(1 << 20, text)
}

/// A number of heads or threads, or the size of a head.
pub(super) fn few(text: &str) -> Result<usize, String> {
    up_to(512, text)
}

fn up_to(max: usize, text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|n| (1..=max).contains(n));
    number.ok_or_else(|| format!("expected a number from 1 to {max}"))
}

pub(super) fn at_least_two(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| *n >= 2).ok_or_else(|| "expected a whole number, at least 2".into())
}

pub(super) fn not_negative(text: &str) -> Result<f32, String> {
    let number = text.parse::<f32>().ok().filter(|x| x.is_finite() && *x >= 0.0);
    number.ok_or_else(|| "expected a number, at least 0".into())
}

pub(super) fn probability(text: &str) -> Result<f32, String> {
    let number = text.parse::<f32>().ok().filter(|x| (0.0..=1.0).contains(x));
    number.ok_or_else(|| "expected a number from 0 to 1".into())
}

/// The size of a screen, such as `160x50`.
pub(super) fn size(text: &str) -> Result<(u16, u16), String> {
    const MAX: u16 = 1000;
    let sides =
        text.split_once('x').and_then(|(columns, rows)| Some((columns.parse().ok()?, rows.parse().ok()?)));
    let fits = |(columns, rows): &(u16, u16)| (1..=MAX).contains(columns) && (1..=MAX).contains(rows);
    sides.filter(fits).ok_or_else(|| format!("expected columns and rows up to {MAX}, such as 160x50"))
}

pub(super) fn interval(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.1..=3600.0).contains(seconds));
    seconds.ok_or_else(|| "expected a number of seconds from 0.1 to 3600".into())
}

pub(super) fn seconds(text: &str) -> Result<f64, String> {
    const MAX_SECONDS: f64 = 1e6;
    match text.parse::<f64>() {
        Ok(seconds) if (0.0..=MAX_SECONDS).contains(&seconds) => Ok(seconds),
        _ => Err("expected a number of seconds".into()),
    }
}
