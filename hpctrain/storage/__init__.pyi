from .content_hash import HASH_DIGITS as HASH_DIGITS, HASH_NAME as HASH_NAME, hash_of as hash_of
from .even_split import part_of as part_of, split_evenly as split_evenly
from .filesystem_type import Filesystem as Filesystem, filesystem_of as filesystem_of
from .full_io import (
    read_up_to as read_up_to,
    replace_file as replace_file,
    sync_directory as sync_directory,
    write_fully as write_fully,
)
from .lease import (
    LOST_AFTER_S as LOST_AFTER_S,
    InUseError as InUseError,
    Lease as Lease,
    LeaseLocation as LeaseLocation,
    check_lease as check_lease,
    release_all as release_all,
    release_lease as release_lease,
    take_lease as take_lease,
)
