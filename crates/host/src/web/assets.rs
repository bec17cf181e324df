//! The page's files, which are inside the program. xterm.js is vendored; xterm/README.md says from
//! where.

use hyper::body::Bytes;

/// Where the page's nonce goes.
const NONCE: &str = "@NONCE@";
const PAGE: &str = include_str!("assets/index.html");
const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";

const FILES: &[(&str, &str, &[u8])] = &[
    ("/app.js", SCRIPT, include_bytes!("assets/app.js")),
    ("/draw.js", SCRIPT, include_bytes!("assets/draw.js")),
    ("/console.js", SCRIPT, include_bytes!("assets/console.js")),
    ("/style.css", STYLE, include_bytes!("assets/style.css")),
    ("/icon.svg", "image/svg+xml", include_bytes!("assets/icon.svg")),
    ("/xterm/xterm.js", SCRIPT, include_bytes!("assets/xterm/xterm.js")),
    ("/xterm/addon-fit.js", SCRIPT, include_bytes!("assets/xterm/addon-fit.js")),
    ("/xterm/xterm.css", STYLE, include_bytes!("assets/xterm/xterm.css")),
    ("/licences.txt", "text/plain; charset=utf-8", include_bytes!("assets/xterm/LICENSE")),
];

/// The file at a path, with its type.
pub(super) fn find(path: &str, nonce: &str) -> Option<(&'static str, Bytes)> {
    if path == "/" {
        return Some(("text/html; charset=utf-8", PAGE.replace(NONCE, nonce).into()));
    }
    let (_, kind, bytes) = FILES.iter().find(|(name, ..)| *name == path)?;
    Some((kind, Bytes::from_static(bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_all_that_it_names_and_names_no_other_host() {
        let (_, page) = find("/", "123abc").unwrap();
        let page = String::from_utf8(page.to_vec()).unwrap();
        assert!(page.contains("nonce=\"123abc\"") && !page.contains(NONCE));
        let mut named = 0;
        for piece in page.split(['"', '\'']).filter(|piece| piece.starts_with('/') && piece.len() > 1) {
            assert!(find(piece, "").is_some(), "{piece}");
            named += 1;
        }
        assert!(named >= 7, "{named}");
        assert!(!page.contains("://") && !page.contains("style=") && !page.contains("onclick"));
        assert_eq!(find("/xterm/../app.js", ""), None);
    }
}
