//! Python buffers as Rust slices: the only place with `unsafe`.
#![expect(unsafe_code, reason = "the buffer protocol hands out raw memory")]

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;

/// Calls `work` with the bytes of a contiguous buffer, without the GIL.
///
/// The caller's Python code must not write to the buffer meanwhile.
pub(crate) fn read<T: Send>(
    buffer: &Bound<'_, PyAny>,
    work: impl FnOnce(&[u8]) -> T + Send,
) -> PyResult<T> {
    let view = contiguous(buffer)?;
    let bytes: &[u8] = if view.item_count() == 0 {
        &[]
    } else {
        // SAFETY: the view is contiguous and keeps the memory alive and in place until it is dropped
        // below, after `work`. That nobody writes to it meanwhile is the documented contract.
        unsafe { std::slice::from_raw_parts(view.buf_ptr().cast(), view.item_count()) }
    };
    Ok(buffer.py().detach(|| work(bytes)))
}

/// Calls `work` with the bytes of a contiguous, writable buffer, without the GIL.
///
/// The caller's Python code must not use the buffer meanwhile.
pub(crate) fn write<T: Send>(
    buffer: &Bound<'_, PyAny>,
    work: impl FnOnce(&mut [u8]) -> T + Send,
) -> PyResult<T> {
    let view = contiguous(buffer)?;
    if view.readonly() {
        return Err(PyBufferError::new_err("the buffer must be writable"));
    }
    let bytes: &mut [u8] = if view.item_count() == 0 {
        &mut []
    } else {
        // SAFETY: as in `read`; the view is writable, and that nobody else uses the memory meanwhile
        // is the documented contract.
        unsafe { std::slice::from_raw_parts_mut(view.buf_ptr().cast(), view.item_count()) }
    };
    Ok(buffer.py().detach(|| work(bytes)))
}

fn contiguous(buffer: &Bound<'_, PyAny>) -> PyResult<PyBuffer<u8>> {
    let view = PyBuffer::<u8>::get(buffer)?;
    if view.is_c_contiguous() {
        Ok(view)
    } else {
        Err(PyBufferError::new_err("the buffer must be contiguous"))
    }
}
