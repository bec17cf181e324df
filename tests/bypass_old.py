"""What kernels before 6.2 and 6.6 get of the bypass, on this kernel: the programs that read by helper calls, as filters behind a clsact qdisc.

Each test is another file's, run so. On such kernels themselves (./x bypass-kernels) the other files are these tests.
"""

import os

import bypass_interfaces
import bypass_kills
import bypass_nat
import bypass_others
import bypass_paths
import bypass_rules
import bypass_together
import bypass_veth
import bypass_windows
from lib import Skip, timeout


def as_old(test):
    if not bypass_paths.has_tcx():
        raise Skip("this kernel is such a one")
    os.environ["TOMBOLO_BYPASS_AS_OLD"] = "1"
    test()


def test_taken_frames_are_byte_for_byte_the_kernels():
    as_old(bypass_paths.test_taken_frames_are_byte_for_byte_the_kernels)


def test_frames_that_xdp_takes_are_byte_for_byte_the_kernels():
    as_old(bypass_paths.test_frames_that_xdp_takes_are_byte_for_byte_the_kernels_and_partial_and_large_ones_are_left_to_tcx)


def test_translated_frames_are_byte_for_byte_the_kernels():
    as_old(bypass_nat.test_translated_frames_are_byte_for_byte_the_kernels)


def test_translated_frames_of_ipv6_are_byte_for_byte_the_kernels():
    as_old(bypass_nat.test_translated_frames_of_ipv6_are_byte_for_byte_the_kernels)


def test_translation_agrees_with_conntrack_under_churn():
    as_old(bypass_nat.test_translation_agrees_with_conntrack_under_churn)


def test_tcp_between_containers_arrives_whole_through_nat_and_a_firewall():
    as_old(bypass_veth.test_tcp_between_containers_arrives_whole_through_nat_and_a_firewall)


def test_a_right_rst_ends_the_entry_in_every_mode():
    as_old(bypass_windows.test_a_right_rst_ends_the_entry_in_every_mode)


def test_data_that_is_guessed_moves_no_window():
    as_old(bypass_windows.test_data_that_is_guessed_moves_no_window)


def test_a_rule_that_comes_judges_the_next_frame_and_one_that_goes_judges_no_more():
    as_old(bypass_rules.test_a_rule_that_comes_judges_the_next_frame_and_one_that_goes_judges_no_more)


def test_detach_leaves_nothing_and_gives_the_way_back():
    as_old(bypass_paths.test_detach_leaves_nothing_and_gives_the_way_back)


def test_what_a_filter_at_the_output_drops_is_dropped_in_every_mode():
    as_old(bypass_others.test_what_a_filter_at_the_output_drops_is_dropped_in_every_mode)


def test_several_bypasses_are_in_line_and_each_goes_without_the_other():
    as_old(bypass_others.test_several_bypasses_are_in_line_and_each_goes_without_the_other)


def test_an_interface_with_the_number_of_one_that_went_is_not_attached_already():
    as_old(bypass_interfaces.test_an_interface_with_the_number_of_one_that_went_is_not_attached_already)


@timeout(600)
def test_attach_killed_at_every_step_leaves_nothing_that_detach_does_not_take():
    as_old(bypass_kills.test_attach_killed_at_every_step_leaves_traffic_flowing_and_nothing_that_detach_does_not_take)


@timeout(600)
def test_detach_everywhere_leaves_no_filter_in_any_namespace():
    as_old(bypass_kills.test_detach_everywhere_leaves_nothing_in_any_namespace)


def test_an_end_with_flags_that_conntrack_does_not_know_is_left_to_it():
    as_old(bypass_windows.test_an_end_with_flags_that_conntrack_does_not_know_is_left_to_it_whatever_its_numbers_are)


def test_what_waited_for_its_neighbour_is_not_learned_under_routes_that_came_meanwhile():
    as_old(bypass_paths.test_what_waited_for_its_neighbour_is_not_learned_under_routes_that_came_meanwhile)


def test_attaches_beside_detaches_and_kills_end_in_one_state_or_the_other():
    as_old(bypass_together.test_attaches_beside_detaches_and_kills_end_in_one_state_or_the_other)


def test_filters_that_were_there_see_every_frame_and_so_do_those_that_come_later():
    as_old(bypass_others.test_without_tcx_filters_that_were_there_see_every_frame_and_so_do_those_that_come_later)
