//! Memory for weights, KV and activations: zeroed, 64-byte aligned, backed by 2 MiB pages where the
//! kernel gives them; and views of it that several tasks write disjoint parts of.

use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};

pub(crate) const HUGE_PAGE_BYTES: usize = 2 << 20;
const ALIGNMENT_BYTES: usize = 64;

/// An anonymous mapping.
pub(crate) struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping is plain memory that no thread owns.
unsafe impl Send for Mapping {}
// SAFETY: as above; who may write which part is the business of `Region`.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Map `bytes` zeros, starting at a huge page; physical memory comes when it is touched.
    fn new(bytes: usize) -> Mapping {
        let bytes = bytes.max(1).next_multiple_of(HUGE_PAGE_BYTES);
        let reserved = bytes + HUGE_PAGE_BYTES;
        // SAFETY: a new anonymous mapping touches nothing that exists; what is cut off below lies
        // within it.
        unsafe {
            let raw = libc::mmap(
                std::ptr::null_mut(),
                reserved,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            );
            assert!(raw != libc::MAP_FAILED, "out of memory: cannot map {bytes} bytes");
            let raw = raw.cast::<u8>();
            let skipped = raw.align_offset(HUGE_PAGE_BYTES);
            if skipped > 0 {
                libc::munmap(raw.cast(), skipped);
            }
            let start = raw.add(skipped);
            if reserved - skipped > bytes {
                libc::munmap(start.add(bytes).cast(), reserved - skipped - bytes);
            }
            #[cfg(target_os = "linux")]
            libc::madvise(start.cast(), bytes, libc::MADV_HUGEPAGE);
            Mapping { start: NonNull::new(start).expect("mappings are not null"), bytes }
        }
    }

    /// Back bytes of the mapping, from a huge page's start on, by physical memory. Their content
    /// stays, whoever reads or writes it meanwhile.
    ///
    /// # Errors
    /// The system refuses, or cannot do it.
    #[cfg(target_os = "linux")]
    pub(crate) fn populate(&self, bytes: Range<usize>) -> io::Result<()> {
        assert!(bytes.start.is_multiple_of(HUGE_PAGE_BYTES) && bytes.end <= self.bytes);
        loop {
            // SAFETY: the range lies within the mapping, and faulting pages in writes to none.
            let outcome = unsafe {
                let start = self.start.as_ptr().add(bytes.start);
                libc::madvise(start.cast(), bytes.len(), libc::MADV_POPULATE_WRITE)
            };
            if outcome == 0 {
                return Ok(());
            }
            match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => {}
                error if error.raw_os_error() == Some(libc::EINVAL) => return Err(unsupported()),
                error => return Err(error),
            }
        }
    }

    /// As above.
    #[cfg(not(target_os = "linux"))]
    pub(crate) fn populate(&self, _: Range<usize>) -> io::Result<()> {
        Err(unsupported())
    }
}

fn unsupported() -> io::Error {
    let message = "this system cannot back memory before it is used; Linux 5.14 can";
    io::Error::new(io::ErrorKind::Unsupported, message)
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping that `new` kept; every region holds an `Arc` of it.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// Words of plain memory, zero at first; the only owner of its range of a mapping.
pub(crate) struct Region {
    mapping: Arc<Mapping>,
    range: Range<usize>, // words
}

impl Region {
    /// A mapping of its own, for what is large.
    #[cfg(not(test))]
    pub(crate) fn new(words: usize) -> Region {
        Region { mapping: Arc::new(Mapping::new(words * 4)), range: 0..words }
    }

    /// As above, but ending at a page that nobody may touch: tests die of an access beyond the end.
    #[cfg(test)]
    pub(crate) fn new(words: usize) -> Region {
        const PAGE_WORDS: usize = 1024;
        let pages = words.div_ceil(PAGE_WORDS);
        let mapping = Mapping::new((pages + 1) * 4 * PAGE_WORDS);
        // SAFETY: the page lies within the mapping and holds nothing.
        unsafe {
            let guard = mapping.start.as_ptr().add(pages * 4 * PAGE_WORDS);
            assert_eq!(libc::mprotect(guard.cast(), 4 * PAGE_WORDS, libc::PROT_NONE), 0);
        }
        let end = pages * PAGE_WORDS;
        Region { mapping: Arc::new(mapping), range: end - words..end }
    }

    /// Have at least so many words; if that takes another mapping, what the region held is lost.
    pub(crate) fn grow(&mut self, words: usize) {
        if self.len() < words {
            *self = Region::new(words.next_power_of_two());
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.range.len()
    }

    /// The mapping, for as long as a region has it, and which of its bytes are this region's.
    pub(crate) fn place(&self) -> (Weak<Mapping>, Range<usize>) {
        (Arc::downgrade(&self.mapping), 4 * self.range.start..4 * self.range.end)
    }

    #[expect(clippy::cast_ptr_alignment, reason = "mappings are page aligned")]
    pub(crate) fn as_ptr(&self) -> *const u32 {
        // SAFETY: the range lies within the mapping.
        unsafe { self.mapping.start.as_ptr().cast::<u32>().add(self.range.start) }
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut u32 {
        self.as_ptr().cast_mut()
    }

    pub(crate) fn as_slice(&self) -> &[u32] {
        // SAFETY: the range is ours alone and initialised; `&self` keeps writers away.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len()) }
    }

    /// The words as float32.
    pub(crate) fn as_floats(&self) -> &[f32] {
        // SAFETY: as above; every bit pattern is a float32.
        unsafe { std::slice::from_raw_parts(self.as_ptr().cast(), self.len()) }
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [u32] {
        // SAFETY: the range is ours alone and initialised; `&mut self` keeps all others away.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr(), self.range.len()) }
    }

    /// The region as a matrix that tasks may write.
    pub(crate) fn rows<T>(&mut self, stride: usize) -> Rows<T> {
        assert_eq!(size_of::<T>(), 4);
        Rows { start: self.as_mut_ptr().cast(), stride, len: self.len() / stride.max(1) }
    }
}

/// Hands out regions of large mappings, so that small weights share huge pages.
pub(crate) struct Slabs {
    slab_bytes: usize,
    current: Mutex<Option<(Arc<Mapping>, usize)>>,
}

impl Slabs {
    pub(crate) fn new() -> Slabs {
        Slabs { slab_bytes: 32 << 20, current: Mutex::new(None) }
    }

    /// A zeroed region of that many words.
    pub(crate) fn allocate(&self, words: usize) -> Region {
        let bytes = (words * 4).next_multiple_of(ALIGNMENT_BYTES);
        if bytes > self.slab_bytes / 4 || cfg!(test) {
            return Region::new(words);
        }
        self.share(words)
    }

    fn share(&self, words: usize) -> Region {
        let bytes = (words * 4).next_multiple_of(ALIGNMENT_BYTES);
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = current.as_ref().is_some_and(|(slab, used)| used + bytes <= slab.bytes);
        if !fits {
            *current = Some((Arc::new(Mapping::new(self.slab_bytes)), 0));
        }
        let (slab, used) = current.as_mut().expect("set above");
        let start = *used / 4;
        *used += bytes;
        Region { mapping: Arc::clone(slab), range: start..start + words }
    }
}

/// A matrix that the tasks of one job read, or write disjoint parts of.
///
/// It is valid while its region is, and while no task writes what another one reads: the operations
/// of a program see to that.
pub(crate) struct Rows<T> {
    start: *mut T,
    stride: usize,
    len: usize,
}

impl<T> Clone for Rows<T> {
    fn clone(&self) -> Rows<T> {
        *self
    }
}

impl<T> Copy for Rows<T> {}

// SAFETY: plain memory; see the type's contract.
unsafe impl<T: Send> Send for Rows<T> {}
// SAFETY: plain memory; see the type's contract.
unsafe impl<T: Sync> Sync for Rows<T> {}

impl<T> Rows<T> {
    /// Elements from one row to the next.
    #[inline(always)]
    pub(crate) fn stride(self) -> usize {
        self.stride
    }

    /// `num_rows` of these rows, from `first` on.
    pub(crate) fn sub_rows(self, first: usize, num_rows: usize) -> Rows<T> {
        Rows { start: self.rows_from(first, num_rows), stride: self.stride, len: num_rows }
    }

    /// Start of a row: `stride` elements.
    #[inline(always)]
    pub(crate) fn row(self, index: usize) -> *mut T {
        assert!(index < self.len, "row {index} of {}", self.len);
        // SAFETY: within the region, as just checked.
        unsafe { self.start.add(index * self.stride) }
    }

    /// Rows from `index` on, `count` of them checked to exist.
    #[inline(always)]
    pub(crate) fn rows_from(self, index: usize, count: usize) -> *mut T {
        assert!(index + count <= self.len, "rows {index}+{count} of {}", self.len);
        // SAFETY: within the region, as just checked.
        unsafe { self.start.add(index * self.stride) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_are_zero_and_disjoint() {
        let slabs = Slabs::new();
        let mut regions: Vec<Region> =
            [1, 17, 4096, 3 << 20, 5].into_iter().map(|words| slabs.allocate(words)).collect();
        for (index, region) in regions.iter_mut().enumerate() {
            assert!(region.as_slice().iter().all(|&word| word == 0));
            region.as_mut_slice().fill(index as u32 + 1);
        }
        for (index, region) in regions.iter().enumerate() {
            assert!(region.as_slice().iter().all(|&word| word == index as u32 + 1));
        }
    }

    #[test]
    fn small_regions_share_a_slab() {
        let slabs = Slabs::new();
        let [first, second] = [100, 50].map(|words| slabs.share(words));
        assert!(Arc::ptr_eq(&first.mapping, &second.mapping));
        assert_eq!((first.range, second.range), (0..100, 112..162));
        let many: Vec<Region> = (0..40).map(|_| slabs.share(1 << 20)).collect();
        assert!(many.iter().all(|region| region.range.end * 4 <= region.mapping.bytes));
    }

    #[test]
    fn mappings_start_at_a_huge_page() {
        assert_eq!(Mapping::new(1 << 20).start.as_ptr() as usize % HUGE_PAGE_BYTES, 0);
    }
}
