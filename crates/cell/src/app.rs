//! The one call between this library and an app, and the name that it goes by.
#![allow(unsafe_code)]

/// Names the app: an async function of the crate's root that takes a [`Net`](crate::Net). When it
/// returns, the cell goes on with the tasks that it has spawned; [`exit`](crate::exit) ends the
/// cell.
#[macro_export]
macro_rules! app {
    ($app:ident) => {
        /// The app, as the cell library calls it.
        mod tombolo_cell_app {
            // For `no_mangle`: the name is this library's own, and an image with two of them does
            // not link.
            #![allow(unsafe_code)]

            #[unsafe(no_mangle)]
            extern "Rust" fn tombolo_cell_app(net: $crate::Net) {
                let app = super::$app(net.clone());
                net.spawn(app);
            }
        }
    };
}

#[cfg(not(test))]
unsafe extern "Rust" {
    fn tombolo_cell_app(net: crate::Net);
}

#[cfg(not(test))]
pub(crate) fn start(net: crate::Net) {
    // SAFETY: `app!` defines the function with this signature; without it the image does not link.
    unsafe { tombolo_cell_app(net) }
}
