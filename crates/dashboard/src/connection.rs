//! A connection: requests are answered one after the other until it is closed.

use std::net::{Shutdown, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;

use crate::request::{BadRequest, Received, RequestReader};
use crate::response::Response;
use crate::routes::Site;

/// Requests of one connection. A browser opens another one.
const MAX_REQUESTS: usize = 1000;

pub(crate) fn serve(mut stream: TcpStream, site: &Site) {
    let _ = stream.set_nodelay(true);
    let mut reader = RequestReader::new();
    for number in 1..=MAX_REQUESTS {
        let (response, head_only, asked_to_close) = match reader.next(&mut stream) {
            Received::Request(request) => {
                // A bug in a view must not end the connection's thread without an answer.
                let answered = catch_unwind(AssertUnwindSafe(|| site.answer(&request)));
                let response = answered.unwrap_or_else(|_| Response::error(500, "an error of this program"));
                (response, request.method == "HEAD", request.closes)
            }
            Received::Bad(bad) => (refusal(bad), false, true),
            Received::Closed => break,
        };
        let closes = asked_to_close || number == MAX_REQUESTS || site.stopping.load(Ordering::Relaxed);
        if response.write(&mut stream, head_only, closes).is_err() || closes {
            break;
        }
    }
    let _ = stream.shutdown(Shutdown::Both);
}

fn refusal(bad: BadRequest) -> Response {
    match bad {
        BadRequest::Malformed => Response::text(400, "this is not a request of HTTP/1.1"),
        BadRequest::TooLarge => Response::text(431, "the request has too many or too long headers"),
        BadRequest::TooSlow => Response::text(408, "the request took too long to arrive"),
        BadRequest::HasBody => Response::text(413, "requests have no body here"),
    }
}
